// The part of PyTorch's C interface that the runtime calls, and errors as exceptions.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/c/shim.h>

#include <string>

// The C interface of the OpenMP runtime that libtorch_cpu brings along. Named here, rather than by a pragma, so that
// nothing links another one: a process with two of them has two pools of threads and worse.
extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_num_threads();
int omp_get_thread_num();
int omp_in_parallel();
int omp_pause_resource_all(int kind) __attribute__((weak));
}

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
