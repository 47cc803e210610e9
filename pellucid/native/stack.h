// A stack for kernels, which keep up to two MiB of what they work on there: a thread that has less calls them on another.
#pragma once

#include <pthread.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdint>

namespace pellucid {
namespace {

constexpr int64_t kStackRoom = 2 << 20;    // what a kernel may need
constexpr int64_t kStackOfOurs = 4 << 20;  // and what we give it

// Where the stack of this thread ends: it grows down to there. 0 if nobody knows.
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
    if (at_ != MAP_FAILED) munmap(at_, kStackOfOurs);
  }
  // Null if there is no memory.
  void* at() {
    if (at_ == MAP_FAILED) at_ = mmap(nullptr, kStackOfOurs, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return at_ == MAP_FAILED ? nullptr : at_;
  }

 private:
  void* at_ = MAP_FAILED;
};

// What is called on another stack; `makecontext` passes nothing but integers to it.
template <class Body> void call_at(uint32_t high, uint32_t low) {
  (*reinterpret_cast<Body*>(uint64_t(high) << 32 | low))();
}

template <class Body> [[gnu::noinline]] void on_our_stack(Body& body) {
  thread_local Stack stack;
  ucontext_t here, there;
  if (!stack.at() || getcontext(&there)) return body();  // no memory: what there is may be enough
  there.uc_stack.ss_sp = stack.at();
  there.uc_stack.ss_size = kStackOfOurs;
  there.uc_link = &here;
  const auto place = reinterpret_cast<uint64_t>(&body);
  makecontext(&there, reinterpret_cast<void (*)()>(call_at<Body>), 2, uint32_t(place >> 32), uint32_t(place));
  swapcontext(&here, &there);
}

// Calls `body`, which throws nothing, with room for what a kernel needs.
template <class Body> void with_room(Body body) {
  thread_local const uintptr_t end = stack_end();
  const auto here = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  if (here > end && here - end < kStackRoom) [[unlikely]] return on_our_stack(body);
  body();
}

}  // namespace
}  // namespace pellucid
