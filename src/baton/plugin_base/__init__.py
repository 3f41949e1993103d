"""The common base of the plug-ins for other engines: settings, ranks that exchange their geometries, an engine's own
memory.
"""
