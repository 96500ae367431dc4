"""Pure functions from predictions and measurements to plotly figures."""
