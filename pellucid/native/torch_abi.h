// The part of PyTorch's C interface that the runtime calls, and errors as exceptions.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/c/shim.h>

#include <string>

namespace pellucid {

constexpr int32_t kCpu = 0;      // c10::DeviceType::CPU
constexpr int32_t kStrided = 0;  // c10::Layout::Strided
constexpr int32_t kByte = 0;     // c10::ScalarType::Byte

struct Failure {
  std::string message;
  bool memory = false;  // there was not enough: Python's MemoryError
};

// Throws what PyTorch says about the call that returned `status`.
inline void check(AOTITorchError status) {
  if (status != AOTI_TORCH_SUCCESS) throw Failure{torch_exception_get_what_without_backtrace()};
}

}  // namespace pellucid
