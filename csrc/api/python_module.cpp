// Lets `import _flashmla_C` work: vLLM loads the library that way, and the import alone registers
// the operators. The module itself is empty. Built against Python's limited API, so that one
// binary serves every Python from 3.10; where Python's headers are not installed the library still
// loads through torch.ops.load_library.

#if __has_include(<Python.h>)

#ifndef Py_LIMITED_API  // a build system may ask for an older one
#define Py_LIMITED_API 0x030A0000
#endif
#include <Python.h>

PyMODINIT_FUNC PyInit__flashmla_C() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_flashmla_C", nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}

#endif
