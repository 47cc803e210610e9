// A compiled graph as the runtime sees it, and its decoding from the words that `encode.py` writes. `words.h`, which
// `words.py` makes, has the enumerations.
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

// An argument of an operator, as the dispatcher's stack wants it.
struct Arg {
  ArgKind kind = ArgKind::kNone;
  int64_t value = 0;        // view number, or the 64 bits of an integer, double, bool or enumerator
  std::string text;
  std::vector<Arg> items;   // of a list; the one value of an optional
};

struct KernelCall {
  Variant variant;
  Words slots, offsets, symbols;  // offsets: in bytes, of the parameters in their slots
  std::vector<std::string> checks;
  Trial* trial = nullptr;   // of several variants, this one among them
  int64_t site = 0;         // among the calls that share it

  bool is_long() const {
    if (!trial) return variant.extent > variant.grain;
    return std::any_of(trial->variants.begin(), trial->variants.end(), [](const Variant& each) { return each.extent > each.grain; });
  }
};

struct ShimCall {  // an out= operator with a C function of its own: its views are out, then the inputs
  Shim which;
  Words views;
  double beta, alpha;
};

struct PythonCall {
  PyObject* function;       // from a list of tensors to a list of tensors
  Words views, outputs;
};

struct DispatcherCall {
  std::string op, overload;
  std::vector<Arg> args;
  Words returns, outputs;   // returns: of `Returned`; outputs: a view for each tensor returned, -1 where it is not used
  PythonCall again;         // the same call, made when this one fails: Python raises eager's own exception
};

struct StripWindow {        // of `bytes` in each part, at the slot's place
  struct Use {
    int64_t parameter, offset;  // among the parameters of all calls; bytes after the buffer's beginning
  };
  int64_t slot, bytes;
  std::vector<Use> uses;
};

struct Strips {             // calls of kernels that are made strip by strip
  int64_t first, last;
  std::vector<StripWindow> windows;
  std::vector<Words> parts; // see `Chain` in strips.py
  Words starts;             // of each call's parameters among those of all, and how many there are

  int64_t calls() const { return last - first + 1; }
};

struct Call {
  std::string name, where;
  std::variant<KernelCall, ShimCall, DispatcherCall, PythonCall> what;
  Words release;            // extern slots that nobody uses after this call
  std::string event;        // how a profiler shows it, with the views `reads` of Plan::shown as its inputs
  Words reads;
  const Strips* strips = nullptr;  // those that begin with it
};

struct Result {
  ResultKind kind;
  int64_t value;
};

// Of a part of strips.
struct StripMemory {
  std::vector<void*> parameters;
  std::vector<char*> buffers;            // where the buffer of each window would begin
};

// What one run works in. It belongs to an arena, and whoever holds the arena may use it.
struct Frame {
  Arena* arena = nullptr;
  char* base = nullptr;                  // of the arena when `tensor` was filled
  std::vector<void*> pointer;            // of each slot
  std::vector<AtenTensorHandle> tensor;  // of each view that an operator or a result needs, or null
  std::vector<AtenTensorHandle> owner;   // of each output and extern slot: the tensor that keeps its memory
  std::vector<int64_t> borrowed;         // views whose `tensor` is deleted at the end of the run
  std::vector<PyObject*> object;         // of each argument: the tensor, referenced during the run
  std::vector<void*> impl;               // of each argument: its TensorImpl; the address of an entry is a handle
  std::vector<void*> parameters;         // of the kernel being called
  std::vector<StripMemory> strips;       // of each part of those that are being made
};

struct Plan {
  int64_t number;           // by which timelines name it
  int64_t inputs, arena_bytes;
  bool has_operators = false, release_gil = false;
  std::string event;        // how a profiler shows a run
  std::vector<Slot> slots;
  std::vector<View> views;
  std::vector<View> shown;  // for profilers only
  std::vector<std::unique_ptr<Trial>> trials;
  std::vector<Call> calls;
  std::vector<Result> results;
  std::vector<std::unique_ptr<Strips>> strips;
  std::atomic<bool> news = false;  // a trial has ended of which nobody was told
  std::mutex mutex;  // of frames
  std::vector<std::unique_ptr<Frame>> frames;

  ~Plan() {
    for (auto& frame : frames) drop_arena_tensors(*frame);
    for (Call& call : calls) {
      if (auto* python = std::get_if<PythonCall>(&call.what)) Py_DecRef(python->function);
      if (auto* dispatcher = std::get_if<DispatcherCall>(&call.what)) Py_DecRef(dispatcher->again.function);
    }
  }

  // The GIL is kept in a run that is too short to be worth releasing it: of a few kernels without work for a second thread.
  void look_at_calls() {
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

// Reads what `encode.py` wrote: 64-bit words; a list is its length and its items, a text its bytes padded to words.
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
    plan->look_at_calls();
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
        dispatcher.again = python();
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
