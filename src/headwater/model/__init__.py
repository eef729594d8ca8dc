"""Models: capture a PyTorch model, list its cuts, ship its prefix, run its suffix.

    freeze   which part may run near the data        split   a captured model as two modules
    capture  the model as a graph, by torch.export   ship    a prefix as an ONNX file, cached by digest
    flow     what the graph does with the data       near    the model with a second way in, for rows
    cuts     where it can be divided, and why not    census  whether the model is still the one that was captured

Imports `headwater.core`, `headwater.errors` and torch; the ONNX exporter only where it exports.
"""
