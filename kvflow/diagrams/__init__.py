"""Pictures of the state machines: layered layout, SVG, and the heat of a trace."""
