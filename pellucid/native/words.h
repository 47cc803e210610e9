#pragma once

#include <cstdint>

namespace pellucid {

constexpr int64_t kAlignment = 64, kRunHead = 8;
enum class Place : int64_t { kArena = 0, kInput = 1, kOutput = 2, kExtern = 3 };  // Where the memory of a slot is.
enum class CallKind : int64_t { kKernel = 0, kShim = 1, kDispatcher = 2, kPython = 3 };  // How a call is made.
enum class Shim : int64_t { kMm = 0, kBmm = 1, kAddmm = 2, kBaddbmm = 3 };  // An operator with its own C function.
enum class ArgKind : int64_t { kView = 0, kBits = 1, kNone = 2, kSome = 3, kList = 4, kText = 5 };  // Kind of an operator's argument.
enum class Returned : int64_t { kTensor = 0, kTensorList = 1, kOther = 2 };  // Kind of a value that the dispatcher returns.
enum class ResultKind : int64_t { kView = 0, kInteger = 1, kNothing = 2 };  // Kind of a result of a graph.

}
