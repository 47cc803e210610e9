// The part of PyTorch's C interface that the runtime calls, and errors as exceptions. Declared here because the runtime
// is also built with the package, where PyTorch may be absent; PyTorch keeps these functions stable. A test compiles
// this file together with PyTorch's own headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

struct AtenTensorOpaque;
struct C10IValueOpaque;
struct AtenRecordFunctionOpaque;
struct IValueMapOpaque;
struct StableListOpaque;
struct StringOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
using C10IValueHandle = C10IValueOpaque*;
using AtenRecordFunctionHandle = AtenRecordFunctionOpaque*;
using IValueMapHandle = IValueMapOpaque*;
using StableListHandle = StableListOpaque*;
using StringHandle = StringOpaque*;
using StableIValue = uint64_t;
using AOTITorchError = int32_t;  // 0: success

extern "C" {
const char* torch_exception_get_what_without_backtrace();
AOTITorchError torch_get_num_threads(uint32_t* count);

AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle, AtenTensorHandle* owned);
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle);
AOTITorchError aoti_torch_is_defined(AtenTensorHandle, bool*);
AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle, void** borrowed);
AOTITorchError aoti_torch_get_numel(AtenTensorHandle, int64_t*);
AOTITorchError aoti_torch_get_storage_size(AtenTensorHandle, int64_t* bytes);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle, int32_t*);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle, int32_t*);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle, int64_t*);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle, int64_t** borrowed);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle, int64_t** borrowed);
AOTITorchError torch_from_blob(
    void* data, int64_t dims, const int64_t* sizes, const int64_t* strides, int64_t offset, int32_t dtype, int32_t device,
    int32_t index, AtenTensorHandle* owned, int32_t layout, const uint8_t* metadata, int64_t metadata_size,
    void (*deleter)(void* data, void* context), void* context);
AOTITorchError aoti_torch__alloc_from_pool(
    AtenTensorHandle, int64_t bytes, int32_t dtype, int64_t dims, const int64_t* sizes, const int64_t* strides,
    AtenTensorHandle* owned);
AOTITorchError aoti_torch__reinterpret_tensor(
    AtenTensorHandle, int64_t dims, const int64_t* sizes, const int64_t* strides, int64_t offset,
    AtenTensorHandle* owned);

bool aoti_torch_grad_mode_is_enabled();
void aoti_torch_grad_mode_set_enabled(bool);

AOTITorchError aoti_torch_copy_(AtenTensorHandle to, AtenTensorHandle from, int32_t non_blocking);
AOTITorchError aoti_torch_cpu_mm_out(AtenTensorHandle out, AtenTensorHandle, AtenTensorHandle);
AOTITorchError aoti_torch_cpu_bmm_out(AtenTensorHandle out, AtenTensorHandle, AtenTensorHandle);
AOTITorchError aoti_torch_cpu_addmm_out(
    AtenTensorHandle out, AtenTensorHandle added, AtenTensorHandle, AtenTensorHandle, double beta, double alpha);
AOTITorchError aoti_torch_cpu_baddbmm_out(
    AtenTensorHandle out, AtenTensorHandle added, AtenTensorHandle, AtenTensorHandle, double beta, double alpha);

// Calls an operator by name. version: of the stable ABI that the stack conforms to.
AOTITorchError torch_call_dispatcher(const char* name, const char* overload, StableIValue* stack, uint64_t version);
AOTITorchError torch_new_stable_ivalue(StableIValue** owned);
AOTITorchError torch_new_string_handle(const char* text, size_t length, StringHandle* owned);
AOTITorchError torch_new_list_reserve_size(size_t size, StableListHandle* owned);
AOTITorchError torch_list_push_back(StableListHandle, StableIValue);
AOTITorchError torch_list_size(StableListHandle, size_t*);
AOTITorchError torch_list_get_item(StableListHandle, size_t index, StableIValue*);
AOTITorchError torch_delete_list(StableListHandle);

AOTITorchError aoti_record_function_start(
    const char* name, IValueMapHandle keywords, const C10IValueHandle* inputs, uint64_t count,
    AtenRecordFunctionHandle* owned);
AOTITorchError aoti_record_function_end(AtenRecordFunctionHandle);
AOTITorchError aoti_torch_tensor_to_ivalue(AtenTensorHandle, C10IValueHandle* owned);
AOTITorchError aoti_torch_delete_c10_value_object(C10IValueHandle);
}

namespace pellucid {

constexpr int32_t kCpu = 0;      // c10::DeviceType::CPU
constexpr int32_t kStrided = 0;  // c10::Layout::Strided
constexpr int32_t kByte = 0;     // c10::ScalarType::Byte
constexpr uint64_t kInterface = 0x020d'0000'0000'0000;  // PyTorch 2.13

struct Failure {
  std::string message;
  bool memory = false;  // out of memory: becomes Python's MemoryError
};

// Throws PyTorch's error message if a call returned an error.
inline void check(AOTITorchError status) {
  if (status != 0) throw Failure{torch_exception_get_what_without_backtrace()};
}

}  // namespace pellucid
