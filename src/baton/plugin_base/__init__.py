"""The common base of the plug-ins for other engines."""
