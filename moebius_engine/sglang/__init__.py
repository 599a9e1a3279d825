"""Everything that touches SGLang 0.5.12's internals."""
