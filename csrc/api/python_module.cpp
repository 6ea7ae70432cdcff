// Lets `import _flashmla_C` work: vLLM loads the library that way, and loading it registers the operators. Built
// against Python's limited API, so that one binary serves every Python from 3.10; where Python's headers are not
// installed the library still loads through torch.ops.load_library.

#if __has_include(<Python.h>)

#ifndef Py_LIMITED_API  // a build system may ask for an older one: vLLM's does
#define Py_LIMITED_API 0x030A0000
#endif
#include <Python.h>

#include "api/namespace.h"

namespace {

// Has FlashMLA's other operators raise NotImplementedError with the library's messages, as flash_mla/_operators.py does
// for the package. A library that torch.ops.load_library loads does not come by here: those operators then raise the
// dispatcher's own NotImplementedError, which names the operator and says only that no backend implements it.
constexpr const char* kRefuseMissingOperators = R"python(
import torch

def _refusal(message):
    def refuse(*arguments, **keywords):
        raise NotImplementedError(message)
    return refuse

_library = torch.library.Library("_flashmla_C", "FRAGMENT")
_missing = iter(torch.ops._flashmla_C.missing_operators())
for _name, _message in zip(_missing, _missing):
    _library.impl(_name, _refusal(_message), "CompositeExplicitAutograd")
)python";

void refuse_missing_operators() {
    // Once a process, however often the module is imported. Registrations last as long as the object behind _library,
    // so the globals are never freed.
    static PyObject* globals = nullptr;
    if (globals) return;
    globals = PyDict_New();
    PyObject* code = globals ? Py_CompileString(kRefuseMissingOperators, "<_flashmla_C>", Py_file_input) : nullptr;
    PyObject* done = code ? PyEval_EvalCode(code, globals, globals) : nullptr;
    // Sparse decoding works without, so the import goes on; the reason is printed.
    if (!done) PyErr_WriteUnraisable(code);
    Py_DecRef(done);
    Py_DecRef(code);
}

}  // namespace

PyMODINIT_FUNC PyInit__flashmla_C() {
    static PyModuleDef module = {
        PyModuleDef_HEAD_INIT, "_flashmla_C", nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr};
    if (flash_mla::kForVllm) refuse_missing_operators();
    return PyModule_Create(&module);
}

#endif
