"""Triton's interpreter without work that it does again and again, or in vain; the results of kernels are the same."""

import dataclasses


def make_quick():
    """Change the interpreter of this process."""
    _check_no_overflow()
    _replace_the_language_once_a_helper()
    _describe_types_once()


def _check_no_overflow():
    """Sums and products of integers would be made again in 64 bits, for a check that is made in debug mode alone."""
    from triton.runtime.interpreter import interpreter_builder as builder

    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _replace_the_language_once_a_helper():
    """A kernel that is launched replaces Triton's language by NumPy's; each call of a helper would do so once more."""
    from triton.runtime import interpreter

    known = set()

    def call_helper(self, *args, **kwargs):
        if self.fn not in known:
            known.add(self.fn)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call_helper


def _describe_types_once():
    """Every result of an operation would check its type's shape and write its name; types never change."""
    from triton.language import core
    from triton.runtime import interpreter

    make_type, make_tensor, find_dtype = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    types = {}
    tensors = {}
    dtypes = {}

    def block_type(self, element_ty, shape):
        key = (element_ty.name, *(size.value if isinstance(size, core.constexpr) else size for size in shape))
        found = types.get(key)
        if found is None:
            make_type(self, element_ty, shape)
            types[key] = vars(self).copy()
        else:
            vars(self).update(found)
            self.element_ty = element_ty

    def tensor(self, handle, type):
        found = tensors.get(type.name)
        if found is None:
            make_tensor(self, handle, type)
            tensors[type.name] = {name: getattr(self, name) for name in ("shape", "numel")}
        else:
            vars(self).update(found, handle=handle, type=type, dtype=type.scalar)

    def np_dtype(type):
        found = dtypes.get(type.name)
        if found is None:
            found = dtypes[type.name] = find_dtype(type)
        return found

    core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = block_type, tensor, np_dtype
