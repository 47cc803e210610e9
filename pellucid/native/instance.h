// The runtime's data structures of a compiled graph, and their decoding from the words that `encode.py` writes. The
// enumerations are in `words.h`, which `words.py` generates.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <variant>
#include <vector>

#include "memory.h"
#include "python_abi.h"
#include "torch_abi.h"
#include "trial.h"
#include "words.h"

namespace pellucid {

using Words = std::vector<int64_t>;

struct Slot {
  Place place;
  int64_t value;          // arena: byte offset; input: argument number; output: bytes
  int64_t only_view = -1; // output: the one view through which the graph returns it, -1 if there are several
};

struct View {
  int64_t slot, dtype, offset, itemsize;  // offset in elements, itemsize in bytes
  Words shape, strides;
};

// An argument of an operator, as the dispatcher's stack requires it.
struct Arg {
  ArgKind kind = ArgKind::kNone;
  int64_t value = 0;        // view number, or the 64 bits of an integer, double, bool or enumerator
  std::string text;
  std::vector<Arg> items;   // of a list; or the single value of an optional
};

struct KernelCall {
  Variant variant;
  Words slots, offsets, symbols;  // offsets: of the parameters in their slots, in bytes
  std::vector<std::string> checks;
  Trial* trial = nullptr;   // of several variants, `variant` among them
  int64_t site = 0;         // the number of this call among those that share the trial

  bool is_long() const {
    if (!trial) return variant.extent > variant.grain;
    return std::any_of(trial->variants.begin(), trial->variants.end(),
                       [](const Variant& each) { return each.extent > each.grain; });
  }
};

struct ShimCall {  // an out= operator with its own C function. views: out, then the inputs
  Shim which;
  Words views;
  double beta, alpha;
};

struct PythonCall {
  PyObject* function;       // takes a list of tensors and returns one
  Words views, outputs;
};

struct DispatcherCall {
  std::string op, overload;
  std::vector<Arg> args;
  Words returns, outputs;   // returns: of `Returned`; outputs: a view for each tensor returned, -1 where it is not used
  PythonCall fallback;      // the same call, used when this one fails: Python raises the same exception as eager mode
};

struct StripWindow {        // `bytes` of the slot in each part
  struct Use {
    int64_t parameter, offset;  // number among the parameters of all calls; bytes from the start of the buffer
  };
  int64_t slot, bytes;
  std::vector<Use> uses;
};

struct Strips {             // calls of kernels that run strip by strip
  int64_t first, last;
  std::vector<StripWindow> windows;
  std::vector<Words> parts; // see `Chain` in strips.py
  Words starts;             // of each call, the number of its first parameter among those of all; then their total

  int64_t calls() const { return last - first + 1; }
};

struct Call {
  std::string name, where;
  std::variant<KernelCall, ShimCall, DispatcherCall, PythonCall> what;
  Words release;            // extern slots whose last use is this call
  std::string event;        // its name in a profiler, with the views `reads` of Plan::shown as its inputs
  Words reads;
  const Strips* strips = nullptr;  // that begin with this call, or null
};

struct Result {
  ResultKind kind;
  int64_t value;
};

// The state of one part of strips.
struct StripMemory {
  std::vector<void*> parameters;
  std::vector<char*> buffers;            // of each window, the address that its buffer's first byte would have
};

// The working state of one run. It belongs to an arena; the run that holds the arena may use it.
struct Frame {
  Arena* arena = nullptr;
  char* base = nullptr;                  // address of the arena when `tensor` was filled
  std::vector<void*> pointer;            // of each slot
  std::vector<AtenTensorHandle> tensor;  // of each view that an operator or a result needs, or null
  std::vector<AtenTensorHandle> owner;   // of each output and extern slot: the tensor that owns its memory
  std::vector<int64_t> borrowed;         // views whose `tensor` is deleted at the end of the run
  std::vector<PyObject*> object;         // of each argument: the tensor, referenced during the run
  std::vector<void*> impl;               // of each argument: its TensorImpl; the address of an entry is a handle
  std::vector<void*> parameters;         // of the kernel being called
  std::vector<StripMemory> strips;       // of each part of the strips being run
};

struct Plan {
  int64_t number;           // its identifier in timelines
  int64_t inputs, arena_bytes;
  bool has_operators = false, release_gil = false;
  std::string event;        // the name of a run in a profiler
  std::vector<Slot> slots;
  std::vector<View> views;
  std::vector<View> shown;  // for profilers only
  std::vector<std::unique_ptr<Trial>> trials;
  std::vector<Call> calls;
  std::vector<Result> results;
  std::vector<std::unique_ptr<Strips>> strips;
  std::atomic<bool> unreported = false;  // a trial has ended and was not reported to Python yet
  std::mutex mutex;  // of frames
  std::vector<std::unique_ptr<Frame>> frames;

  ~Plan() {
    for (auto& frame : frames) drop_arena_tensors(*frame);
    for (Call& call : calls) {
      if (auto* python = std::get_if<PythonCall>(&call.what)) Py_DecRef(python->function);
      if (auto* dispatcher = std::get_if<DispatcherCall>(&call.what)) Py_DecRef(dispatcher->fallback.function);
    }
  }

  // A run of a few kernels, none with work for a second thread, is too short to be worth releasing the GIL.
  void inspect_calls() {
    release_gil = calls.size() > 4;
    for (const Call& call : calls) {
      auto* kernel = std::get_if<KernelCall>(&call.what);
      has_operators |= !kernel;
      release_gil |= !kernel || kernel->is_long();
    }
  }

  void drop_arena_tensors(Frame& frame) {
    for (AtenTensorHandle& tensor : frame.tensor) {
      if (tensor) aoti_torch_delete_tensor_object(tensor);
      tensor = nullptr;
    }
  }
};

// Decodes the 64-bit words of `encode.py`: a list is its length and its items, a text its length and its padded bytes.
class Reader {
 public:
  Reader(const int64_t* words) : at_(words) {}

  Plan* plan() {
    auto plan = std::make_unique<Plan>();
    plan->number = word();
    plan->inputs = word();
    plan->arena_bytes = word();
    list(plan->slots, [&] { return Slot{static_cast<Place>(word()), word(), word()}; });
    plan->event = text();
    for (auto* views : {&plan->views, &plan->shown})
      list(*views, [&] { return View{word(), word(), word(), word(), words(), words()}; });
    list(plan->trials, [&] {
      std::vector<Variant> variants;
      list(variants, [&] { return variant(); });
      int64_t threads = word(), sites = word();
      auto* settled = reinterpret_cast<PyObject*>(word());
      return std::make_unique<Trial>(std::move(variants), threads, sites, settled, plan->trials.size());
    });
    list(plan->calls, [&] { return call(*plan); });
    list(plan->results, [&] { return Result{static_cast<ResultKind>(word()), word()}; });
    list(plan->strips, [&] { return strips(*plan); });
    plan->inspect_calls();
    return plan.release();
  }

 private:
  int64_t word() { return *at_++; }

  double real() {
    int64_t bits = word();
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }

  template <class T, class Item>
  void list(std::vector<T>& out, Item item) {
    int64_t n = word();
    out.reserve(n);
    while (n-- > 0) out.push_back(item());
  }

  Words words() {
    Words out;
    list(out, [&] { return word(); });
    return out;
  }

  std::string text() {
    int64_t n = word();
    std::string out(reinterpret_cast<const char*>(at_), n);
    at_ += (n + 7) / 8;
    return out;
  }

  Arg arg() {
    Arg out;
    out.kind = static_cast<ArgKind>(word());
    switch (out.kind) {
      case ArgKind::kView:
      case ArgKind::kBits: out.value = word(); break;
      case ArgKind::kNone: break;
      case ArgKind::kSome: out.items.push_back(arg()); break;
      case ArgKind::kList: list(out.items, [&] { return arg(); }); break;
      case ArgKind::kText: out.text = text(); break;
    }
    return out;
  }

  Variant variant() { return {reinterpret_cast<KernelFunction>(word()), word(), word()}; }

  Call call(const Plan& plan) {
    Call out{text(), text(), {}, {}, {}, {}};
    switch (static_cast<CallKind>(word())) {  // braces, unlike parentheses, evaluate their members in order
      case CallKind::kKernel: {
        KernelCall kernel{variant(), words(), words(), words(), {}};
        list(kernel.checks, [&] { return text(); });
        int64_t trial = word();
        kernel.site = word();
        if (trial >= 0) kernel.trial = plan.trials[trial].get();
        out.what = std::move(kernel);
        break;
      }
      case CallKind::kShim: out.what = ShimCall{static_cast<Shim>(word()), words(), real(), real()}; break;
      case CallKind::kDispatcher: {
        DispatcherCall dispatcher{text(), text(), {}, {}, {}, {}};
        list(dispatcher.args, [&] { return arg(); });
        dispatcher.returns = words();
        dispatcher.outputs = words();
        dispatcher.fallback = python();
        out.what = std::move(dispatcher);
        break;
      }
      case CallKind::kPython: out.what = python(); break;
    }
    out.release = words();
    out.event = text();
    out.reads = words();
    return out;
  }

  std::unique_ptr<Strips> strips(Plan& plan) {
    auto out = std::make_unique<Strips>(Strips{word(), word(), {}, {}, {0}});
    list(out->windows, [&] { return StripWindow{word(), word(), {}}; });
    list(out->parts, [&] { return words(); });
    plan.calls[out->first].strips = out.get();
    for (int64_t number = out->first; number <= out->last; number++) {
      const KernelCall& call = std::get<KernelCall>(plan.calls[number].what);
      for (size_t i = 0; i < call.slots.size(); i++)
        for (StripWindow& window : out->windows)
          if (window.slot == call.slots[i])
            window.uses.push_back({out->starts.back() + static_cast<int64_t>(i), call.offsets[i]});
      out->starts.push_back(out->starts.back() + static_cast<int64_t>(call.slots.size()));
    }
    return out;
  }

  PythonCall python() {
    PythonCall out{reinterpret_cast<PyObject*>(word()), words(), words()};
    Py_IncRef(out.function);
    return out;
  }

  const int64_t* at_;
};

}  // namespace pellucid
