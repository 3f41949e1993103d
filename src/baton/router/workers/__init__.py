"""One router as several processes behind one port (`--workers`)."""
