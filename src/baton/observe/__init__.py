"""What an operator sees of a deployment: acceptance and its alarms, requests and their timelines."""
