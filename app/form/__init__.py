"""Settings as a form, and presets."""
