"""Attention backends with one interface (`base`), chosen by name (`registry`); and scans of recurrent layers."""
