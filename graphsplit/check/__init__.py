"""The comparison of ``graphsplit check``: the records of two runs of one script.

``request`` says what is asked of a process, ``record`` is what it notes, ``compare`` gives the
first difference, ``pinpoint`` the operation it comes from, ``text`` says it. None imports torch.
"""
