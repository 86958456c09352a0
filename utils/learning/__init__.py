"""The model, its losses, its optimizer."""
