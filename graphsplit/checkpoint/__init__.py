"""Training state on disk: safetensors files and one JSON manifest, nothing pickled.

From what knows least to what knows most:

- ``values``: nested Python values as JSON and named tensors, and back. Pure, as the next two.
- ``layout``: where each tensor lies in a safetensors file.
- ``manifest``: what belongs to one save.
- ``files``: one file, written durably or read tensor by tensor.
- ``folder``: a save's folder: what is complete in it, and what is old.
- ``group``: the few exchanges between workers that a save needs.
- ``contents``: what a worker has to save.
- ``save``: all workers save together.
- ``source``, ``restore``: all workers find a save, compare it with what they have, and load it.
- ``position``: how far training has come, and how it goes on in the middle of an epoch.
- ``states``: what a Model calls.
"""
