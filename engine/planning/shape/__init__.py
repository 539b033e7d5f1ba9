"""The sizes of a model, as the planner sees them, bundled, cached or measured."""
