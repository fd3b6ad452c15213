"""From a kernel and its arguments to a launch; what knows of attention is in `ops` and `dist`."""
