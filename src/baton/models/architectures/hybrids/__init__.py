"""Models with recurrent layers between attention layers."""
