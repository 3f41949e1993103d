"""Models with recurrent layers between those of attention."""
