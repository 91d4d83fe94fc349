"""SketchSSM: calibration statistics, basis, scores, allocation, the calibration file, the view."""
