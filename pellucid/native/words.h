#pragma once

#include <cstdint>

namespace pellucid {

constexpr int64_t kAlignment = 64, kRunHead = 8;
enum class Place : int64_t { kArena = 0, kInput = 1, kOutput = 2, kExtern = 3 };  // Of a slot.
enum class CallKind : int64_t { kKernel = 0, kShim = 1, kDispatcher = 2, kPython = 3 };  // How a call is made.
enum class Shim : int64_t { kMm = 0, kBmm = 1, kAddmm = 2, kBaddbmm = 3 };  // An operator with a C function of its own.
enum class ArgKind : int64_t { kView = 0, kBits = 1, kNone = 2, kSome = 3, kList = 4, kText = 5 };  // Of an argument of an operator.
enum class Returned : int64_t { kTensor = 0, kTensorList = 1, kOther = 2 };  // What the dispatcher returns.
enum class ResultKind : int64_t { kView = 0, kInteger = 1, kNothing = 2 };  // What a graph returns.

}
