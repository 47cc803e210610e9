// A stack for kernels, which keep up to two MiB of working data there: a thread that has less runs them on another one.
#pragma once

#include <pthread.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdint>

namespace pellucid {
namespace {

constexpr int64_t kKernelStack = 2 << 20;  // bytes that a kernel may need
constexpr int64_t kOurStack = 4 << 20;     // bytes of the stack that we allocate

// The lowest usable address of this thread's stack, which grows downwards; 0 if unknown.
uintptr_t stack_end() {
  pthread_attr_t attributes;
  if (pthread_getattr_np(pthread_self(), &attributes)) return 0;
  void* lowest = nullptr;
  size_t size = 0, guard = 0;
  pthread_attr_getstack(&attributes, &lowest, &size);
  pthread_attr_getguardsize(&attributes, &guard);
  pthread_attr_destroy(&attributes);
  return reinterpret_cast<uintptr_t>(lowest) + guard;
}

// Memory for a stack, given back when the thread ends.
class Stack {
 public:
  ~Stack() {
    if (at_ != MAP_FAILED) munmap(at_, kOurStack);
  }
  // Its address; null if there is no memory.
  void* at() {
    if (at_ == MAP_FAILED) at_ = mmap(nullptr, kOurStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return at_ == MAP_FAILED ? nullptr : at_;
  }

 private:
  void* at_ = MAP_FAILED;
};

// The entry function on the other stack; `makecontext` passes only integers, so the address comes in two halves.
template <class Body> void call_at(uint32_t high, uint32_t low) {
  (*reinterpret_cast<Body*>(uint64_t(high) << 32 | low))();
}

template <class Body> [[gnu::noinline]] void on_our_stack(Body& body) {
  thread_local Stack stack;
  ucontext_t here, there;
  if (!stack.at() || getcontext(&there)) return body();  // no memory: the rest of this stack may be enough
  there.uc_stack.ss_sp = stack.at();
  there.uc_stack.ss_size = kOurStack;
  there.uc_link = &here;
  const auto address = reinterpret_cast<uint64_t>(&body);
  makecontext(&there, reinterpret_cast<void (*)()>(call_at<Body>), 2, uint32_t(address >> 32), uint32_t(address));
  swapcontext(&here, &there);
}

// Calls `body`, which must not throw, with enough stack for a kernel.
template <class Body> void with_stack(Body body) {
  thread_local const uintptr_t end = stack_end();
  const auto here = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  if (here > end && here - end < kKernelStack) [[unlikely]] return on_our_stack(body);
  body();
}

}  // namespace
}  // namespace pellucid
