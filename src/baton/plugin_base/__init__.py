"""What the plug-ins for other engines share: settings, ranks that exchange their geometries, an engine's own memory."""
