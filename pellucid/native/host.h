// Global state of the runtime: facts about this Python and this PyTorch, its memory and its clocks; and tensor helpers.
#pragma once

#include <exception>

#include "contention.h"
#include "instance.h"
#include "openmp_abi.h"
#include "timeline.h"

namespace pellucid {
namespace {

// Facts about this Python and this PyTorch that `loader.py` determines, and callbacks.
struct Host {
  int64_t type_offset, impl_offset;  // in a tensor object, of its type and of its TensorImpl, in bytes
  int64_t storage_offset;            // in a TensorImpl, of its StorageImpl
  PyObject *tensor_type, *parameter_type;
  PyObject* (*wrap)(AtenTensorHandle);  // handle to Python object, without taking ownership; null: use `steal`
  PyObject* steal;                      // list of capsules with handles, which it owns then, to list of tensors
  PyObject* outside_inference;          // calls pellucid_fill on a capsule, with inference mode off
  PyObject *profiler_globals, *profiler_flag;  // the dictionary and key of torch.profiler's flag
  int64_t (*version)(AtenTensorHandle);  // a tensor's version counter; throws for an inference tensor
};

Host host;
Pool& pool = *new Pool;        // both outlive every tensor, so they are never destroyed
Arenas& arenas = *new Arenas;
Contention& contention = *new Contention;
Timeline& timeline = *new Timeline;
bool single_threaded = false;  // in a child of fork whose team of threads did not survive

// ------------------------------------------------------------------------------------------------ tensors

template <class T>
T field(PyObject* object, int64_t offset) {
  return *reinterpret_cast<T*>(reinterpret_cast<char*>(object) + offset);
}

bool is_tensor(PyObject* object) {
  auto* type = field<PyObject*>(object, host.type_offset);
  return type == host.tensor_type || type == host.parameter_type || PyType_IsSubtype(type, host.tensor_type);
}

// The handle of the tensor whose TensorImpl pointer is stored at `impl`: an at::Tensor is such a pointer.
AtenTensorHandle handle_at(void** impl) { return reinterpret_cast<AtenTensorHandle>(impl); }

AtenTensorHandle new_handle(AtenTensorHandle tensor) {
  AtenTensorHandle out;
  check(aoti_torch_new_tensor_handle(tensor, &out));
  return out;
}

void free_block(void* block, void* bytes) { pool.free(block, reinterpret_cast<int64_t>(bytes)); }

// A tensor over `data`. With bytes >= 0, `data` is a pool block of that size, which the tensor frees.
AtenTensorHandle from_blob(void* data, const Words& shape, const Words& strides, int64_t dtype, int64_t bytes) {
  AtenTensorHandle out;
  check(torch_from_blob(data, shape.size(), shape.data(), strides.data(), 0, dtype, kCpu, -1, &out, kStrided, nullptr,
                        0, bytes >= 0 ? free_block : nullptr, reinterpret_cast<void*>(bytes)));
  return out;
}

Failure no_memory(int64_t bytes) {
  return {"out of memory: cannot allocate " + std::to_string(bytes) + " bytes for a result", true};
}

void* pool_alloc(int64_t bytes) {
  void* block = pool.alloc(bytes);
  if (!block) throw no_memory(bytes);
  return block;
}

void* data_of(AtenTensorHandle tensor) {
  void* data;
  check(aoti_torch_get_data_ptr(tensor, &data));
  return data;
}

std::string text_of(const int64_t* values, int64_t n) {
  std::string out = "[";
  for (int64_t i = 0; i < n; i++) out += (i ? ", " : "") + std::to_string(values[i]);
  return out + "]";
}

struct Shape {
  int64_t dims;
  int64_t *sizes, *strides;
  int32_t dtype;

  explicit Shape(AtenTensorHandle tensor) {
    check(aoti_torch_get_dim(tensor, &dims));
    check(aoti_torch_get_sizes(tensor, &sizes));
    check(aoti_torch_get_strides(tensor, &strides));
    check(aoti_torch_get_dtype(tensor, &dtype));
  }

  bool same_sizes(const View& view) const {
    return dtype == view.dtype && dims == static_cast<int64_t>(view.shape.size()) &&
           std::equal(sizes, sizes + dims, view.shape.begin());
  }

  // Whether strides are equal; unless `exact`, only in dimensions where they matter.
  bool same_strides(const View& view, bool exact) const {
    bool empty = std::find(sizes, sizes + dims, 0) != sizes + dims;
    for (int64_t i = 0; i < dims; i++)
      if (strides[i] != view.strides[i] && (exact || (sizes[i] > 1 && !empty))) return false;
    return true;
  }
};

}  // namespace
}  // namespace pellucid
