// The part of Python's stable ABI that the runtime calls. Declared here because Python.h comes in a package of its
// own that many machines lack; these functions have kept their meaning since Python 3.2 (the last two: 3.9).
#pragma once

#include <cstddef>

extern "C" {
struct PyObject;
struct PyThreadState;

struct PyMethodDef {
  const char* ml_name;
  PyObject* (*ml_meth)(PyObject* self, PyObject* arg);
  int ml_flags;
  const char* ml_doc;
};
constexpr int METH_O = 8;

void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);

PyObject* PyList_New(ptrdiff_t);
ptrdiff_t PyList_Size(PyObject*);
PyObject* PyList_GetItem(PyObject*, ptrdiff_t);           // borrowed
int PyList_SetItem(PyObject*, ptrdiff_t, PyObject*);      // steals
PyObject* PyLong_FromLongLong(long long);
PyObject* PyDict_GetItem(PyObject*, PyObject*);           // borrowed
int PyType_IsSubtype(PyObject*, PyObject*);

PyObject* PyCapsule_New(void*, const char* name, void (*destructor)(PyObject*));
void* PyCapsule_GetPointer(PyObject*, const char* name);
PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject* self, PyObject* module);
PyObject* PyObject_CallFunctionObjArgs(PyObject*, ...);   // a null ends the arguments

PyThreadState* PyEval_SaveThread();
void PyEval_RestoreThread(PyThreadState*);

void PyErr_SetString(PyObject*, const char*);
void PyErr_Clear();
void PyErr_WriteUnraisable(PyObject*);
extern PyObject* PyExc_IndexError;
extern PyObject* PyExc_MemoryError;
extern PyObject* PyExc_RuntimeError;
extern PyObject* PyExc_TypeError;
extern PyObject _Py_NoneStruct;
extern PyObject _Py_TrueStruct;
}
