"""What all charts share: axes, thinned curves, colors, and how they are drawn."""
