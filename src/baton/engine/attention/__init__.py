"""Attention backends, behind one interface (`base`) and chosen by name (`registry`), and scans of recurrent layers."""
