"""Whole forwards of few rows in one parallel region."""
