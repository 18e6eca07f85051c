"""Torch's private names about symbolic sizes: see :mod:`graphsplit.torch_ext.private`.

They stand apart because they import sympy and the compiler's front end, which takes its time.
"""

from torch._dynamo.source import ConstantSource
from torch.fx.experimental.sym_node import SymNode
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

__all__ = ["ConstantSource", "PythonReferenceAnalysis", "SymNode", "sympy_interp"]
