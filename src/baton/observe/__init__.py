"""What operators see of a deployment: acceptance and its alarms, requests and their timelines."""
