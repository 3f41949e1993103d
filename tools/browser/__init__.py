"""What is seen in Chromium: pictures of the dashboard and of traces, and faults told from them."""
