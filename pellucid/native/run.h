// One run of a compiled graph: binds its arguments, executes its calls, returns its results.
#pragma once

#include "strips.h"

namespace pellucid {
namespace {

// A torch.profiler event for a run or a call, from `start` until its destruction.
class Record {
 public:
  ~Record() {
    if (handle_) [[unlikely]] aoti_record_function_end(handle_);
  }

  void start(const std::string& event, const std::vector<AtenTensorHandle>& inputs) {
    std::vector<C10IValueHandle> values;
    for (AtenTensorHandle tensor : inputs) check(aoti_torch_tensor_to_ivalue(tensor, &values.emplace_back()));
    AOTITorchError status =
        aoti_record_function_start(event.c_str(), nullptr, values.data(), values.size(), &handle_);
    for (C10IValueHandle value : values) aoti_torch_delete_c10_value_object(value);
    check(status);
  }

 private:
  AtenRecordFunctionHandle handle_ = nullptr;
};

constexpr uintptr_t kLowAddresses = uintptr_t(1) << 32;  // tensors are not allocated below this address

class Run {
 public:
  // profile: torch.profiler is on. times: where to record the times of the calls, or null.
  Run(Plan& plan, Frame& frame, bool profile, RunTimes* times)
      : plan_(plan), frame_(frame), profile_(profile), times_(times), observed_(profile || times) {}

  // False: a Python exception is set. The GIL is held, though Python code may release it meanwhile.
  bool bind(PyObject* args) {
    for (const Slot& slot : plan_.slots) {
      if (slot.place != Place::kInput || frame_.object[slot.value]) continue;
      PyObject* object = PyList_GetItem(args, slot.value);
      if (!is_tensor(object)) {
        PyErr_SetString(PyExc_TypeError, ("argument " + std::to_string(slot.value) + " is not a tensor").c_str());
        return false;
      }
      Py_IncRef(object);
      frame_.object[slot.value] = object;
      frame_.impl[slot.value] = field<void*>(object, host.impl_offset);
    }
    return true;
  }

  // Throws Failure. `thread`: the state that was saved when the GIL was released, or null.
  bool execute(PyThreadState*& thread) {
    thread_ = &thread;
    set_pointers();
    Record record;
    if (profile_) [[unlikely]] start_event(record);
    if (times_) [[unlikely]] times_->begin_calls();
    for (const Call *call = plan_.calls.data(), *end = call + plan_.calls.size(); call != end; call++) {
      current_ = call;
      if (call->strips) call += strips(*call->strips);
      else if (!(observed_ ? observed_step(*call) : step(*call))) [[unlikely]] return false;
    }
    return true;
  }

  PyObject* results() {
    PyObject* list = PyList_New(static_cast<ptrdiff_t>(plan_.results.size()));
    for (size_t i = 0; i < plan_.results.size(); i++) {
      PyObject* item = result(plan_.results[i]);
      if (!item) {
        Py_DecRef(list);
        return nullptr;
      }
      PyList_SetItem(list, static_cast<ptrdiff_t>(i), item);
    }
    return list;
  }

  // Releases everything that belongs to this run only. The GIL is held.
  void finish() {
    for (int64_t view : frame_.borrowed) drop_view(view);
    frame_.borrowed.clear();
    for (size_t i = 0; i < plan_.slots.size(); i++) {
      const Slot& slot = plan_.slots[i];
      if (slot.place == Place::kArena || slot.place == Place::kInput) continue;
      if (frame_.owner[i]) aoti_torch_delete_tensor_object(frame_.owner[i]);
      else if (slot.place == Place::kOutput && frame_.pointer[i]) pool.free(frame_.pointer[i], slot.value);
      frame_.owner[i] = nullptr;
      frame_.pointer[i] = nullptr;
    }
    for (PyObject*& object : frame_.object) {
      if (object) Py_DecRef(object);
      object = nullptr;
    }
  }

  // The error message, with the operator and the user's line.
  std::string describe(const Failure& failure) const {
    if (!current_) return failure.message;
    std::string text = current_->name + ": " + failure.message;
    return current_->where.empty() ? text : text + "\n  at " + current_->where;
  }

 private:
  bool step(const Call& call) {
    if (!dispatch(call)) return false;
    for (int64_t slot : call.release) drop(slot);
    return true;
  }

  // Runs strips; returns how many calls follow their first one.
  int64_t strips(const Strips& strips) {
    Record record;
    if (profile_) [[unlikely]] start_event(record, plan_.calls[strips.first], " to " + plan_.calls[strips.last].name);
    run_strips(plan_, strips, frame_, times_);
    for (int64_t number = strips.first; number <= strips.last; number++)
      for (int64_t slot : plan_.calls[number].release) drop(slot);
    return strips.last - strips.first;
  }

  bool profiled_step(const Call& call) {
    Record record;
    start_event(record, call);
    return step(call);
  }

  // Like `step`, with an event for torch.profiler or the time of the call.
  bool observed_step(const Call& call) {
    if (!(profile_ ? profiled_step(call) : step(call))) return false;
    if (times_) times_->end_call();
    return true;
  }

  // Starts the event of the run, with the tensors among its arguments as inputs.
  void start_event(Record& record) {
    std::vector<AtenTensorHandle> tensors;
    for (void*& impl : frame_.impl)
      if (frame_.object[&impl - frame_.impl.data()]) tensors.push_back(handle_at(&impl));
    record.start(plan_.event, tensors);
  }

  // Starts the event of a call. Its inputs are temporary tensors over the views that it reads, for their sizes.
  void start_event(Record& record, const Call& call, const std::string& more = "") {
    std::vector<AtenTensorHandle> tensors;
    for (int64_t number : call.reads) {
      const View& view = plan_.shown[number];
      char* data = static_cast<char*>(frame_.pointer[view.slot]) + view.offset * view.itemsize;
      tensors.push_back(from_blob(data, view.shape, view.strides, view.dtype, -1));
    }
    record.start(call.event + more, tensors);
    for (AtenTensorHandle tensor : tensors) aoti_torch_delete_tensor_object(tensor);
  }

  void set_pointers() {
    for (size_t i = 0; i < plan_.slots.size(); i++) {
      const Slot& slot = plan_.slots[i];
      if (slot.place == Place::kInput) frame_.pointer[i] = argument_data(slot.value);
      if (slot.place != Place::kOutput) continue;
      frame_.pointer[i] = pool.alloc(slot.value);
      if (frame_.pointer[i]) [[likely]] continue;
      current_ = first_user(static_cast<int64_t>(i));
      throw no_memory(slot.value);
    }
  }

  // Throws Failure for a tensor whose storage was resized to 0 bytes, as libraries that offload parameters do. Its data
  // pointer is then its offset in the storage, from address 0, where no tensor is allocated.
  void* argument_data(int64_t number) {
    AtenTensorHandle tensor = handle_at(&frame_.impl[number]);
    void* data = data_of(tensor);
    if (reinterpret_cast<uintptr_t>(data) < kLowAddresses) [[unlikely]] {
      int64_t numel = 0, storage = 0;
      check(aoti_torch_get_numel(tensor, &numel));
      check(aoti_torch_get_storage_size(tensor, &storage));
      if (numel > 0 && storage == 0)
        throw Failure{"argument " + std::to_string(number) + " is a tensor of " + std::to_string(numel) +
                      " elements whose storage has 0 bytes: it was resized, and has to be filled again before the call"};
    }
    return data;
  }

  // The first kernel that uses a slot, or null.
  const Call* first_user(int64_t slot) const {
    for (const Call& call : plan_.calls)
      if (auto* kernel = std::get_if<KernelCall>(&call.what))
        if (std::find(kernel->slots.begin(), kernel->slots.end(), slot) != kernel->slots.end()) return &call;
    return nullptr;
  }

  bool dispatch(const Call& call) {
    switch (call.what.index()) {
      case 0: return kernel(std::get<0>(call.what));
      case 1: return shim(std::get<1>(call.what));
      case 2: return dispatcher(std::get<2>(call.what));
      default: return python(std::get<3>(call.what));
    }
  }

  bool kernel(const KernelCall& call) {
    int64_t status = run_kernel(call, frame_, times_, plan_.unreported);
    if (status == 0) [[likely]] return true;
    const IndexFailure& failure = *reinterpret_cast<const IndexFailure*>(status);
    std::string message = call.checks.at(failure.check);
    fill_in(message, "{index}", failure.index);
    fill_in(message, "{size}", failure.size);
    with_gil([&] { PyErr_SetString(PyExc_IndexError, message.c_str()); });
    return false;
  }

  bool shim(const ShimCall& call) {
    AtenTensorHandle t[4];
    for (size_t i = 0; i < call.views.size(); i++) t[i] = tensor(call.views[i]);
    switch (call.which) {
      case Shim::kMm: check(aoti_torch_cpu_mm_out(t[0], t[1], t[2])); break;
      case Shim::kBmm: check(aoti_torch_cpu_bmm_out(t[0], t[1], t[2])); break;
      case Shim::kAddmm: check(aoti_torch_cpu_addmm_out(t[0], t[1], t[2], t[3], call.beta, call.alpha)); break;
      case Shim::kBaddbmm:
        check(aoti_torch_cpu_baddbmm_out(t[0], t[1], t[2], t[3], call.beta, call.alpha));
        break;
    }
    return true;
  }

  bool dispatcher(const DispatcherCall& call) {
    std::vector<StableIValue> stack(std::max(call.args.size(), call.returns.size()));
    for (size_t i = 0; i < call.args.size(); i++) stack[i] = boxed(call.args[i]);
    if (torch_call_dispatcher(call.op.c_str(), call.overload.c_str(), stack.data(), kInterface)) {
      with_gil([] { PyErr_Clear(); });  // operators written in Python leave their exception set
      if (!python(call.fallback)) return false;
      throw Failure{"internal error: the dispatcher's C interface refused a call that Python could make"};
    }
    std::vector<AtenTensorHandle> tensors;
    for (size_t i = 0; i < call.returns.size(); i++) {
      if (Returned{call.returns[i]} == Returned::kTensor) tensors.push_back(reinterpret_cast<AtenTensorHandle>(stack[i]));
      if (Returned{call.returns[i]} == Returned::kTensorList) unpack(reinterpret_cast<StableListHandle>(stack[i]), tensors);
    }
    receive(call.outputs, tensors);
    return true;
  }

  // The dispatcher takes ownership of everything on its stack.
  StableIValue boxed(const Arg& arg) {
    switch (arg.kind) {
      case ArgKind::kView: return reinterpret_cast<StableIValue>(new_handle(tensor(arg.value)));
      case ArgKind::kBits: return static_cast<StableIValue>(arg.value);
      case ArgKind::kNone: return 0;
      case ArgKind::kSome: {
        StableIValue* some;
        check(torch_new_stable_ivalue(&some));
        *some = boxed(arg.items[0]);
        return reinterpret_cast<StableIValue>(some);
      }
      case ArgKind::kList: {
        StableListHandle list;
        check(torch_new_list_reserve_size(arg.items.size(), &list));
        for (const Arg& item : arg.items) check(torch_list_push_back(list, boxed(item)));
        return reinterpret_cast<StableIValue>(list);
      }
      case ArgKind::kText: {
        StringHandle text;
        check(torch_new_string_handle(arg.text.data(), arg.text.size(), &text));
        return reinterpret_cast<StableIValue>(text);
      }
    }
    return 0;
  }

  static void unpack(StableListHandle list, std::vector<AtenTensorHandle>& out) {
    size_t n = 0;
    check(torch_list_size(list, &n));
    for (size_t i = 0; i < n; i++) {
      StableIValue item;
      check(torch_list_get_item(list, i, &item));
      out.push_back(reinterpret_cast<AtenTensorHandle>(item));
    }
    check(torch_delete_list(list));
  }

  bool python(const PythonCall& call) {
    bool good = false;
    std::vector<AtenTensorHandle> tensors;
    with_gil([&] {
      PyObject* list = PyList_New(static_cast<ptrdiff_t>(call.views.size()));
      for (size_t i = 0; i < call.views.size(); i++)
        PyList_SetItem(list, static_cast<ptrdiff_t>(i), argument(call.views[i]));
      PyObject* returned = PyObject_CallFunctionObjArgs(call.function, list, nullptr);
      Py_DecRef(list);
      if (!returned) return;
      for (ptrdiff_t i = 0; i < PyList_Size(returned); i++) {
        PyObject* item = PyList_GetItem(returned, i);
        void* impl = is_tensor(item) ? field<void*>(item, host.impl_offset) : nullptr;
        tensors.push_back(impl ? new_handle(handle_at(&impl)) : nullptr);
      }
      Py_DecRef(returned);
      good = true;
    });
    if (good) receive(call.outputs, tensors);
    return good;
  }

  // Takes ownership of the tensors that an operator returned.
  void receive(const Words& outputs, std::vector<AtenTensorHandle>& tensors) {
    std::string wrong;
    if (tensors.size() < outputs.size())
      wrong = "returned " + std::to_string(tensors.size()) + " tensors, expected " + std::to_string(outputs.size());
    for (size_t i = 0; i < tensors.size(); i++) {
      bool wanted = i < outputs.size() && outputs[i] >= 0 && wrong.empty();
      if (wanted) wrong = bind_result(outputs[i], tensors[i]);
      else if (tensors[i]) aoti_torch_delete_tensor_object(tensors[i]);
    }
    if (!wrong.empty()) throw Failure{wrong};
  }

  // Binds the extern slot of a view to a tensor and takes ownership of it; returns an error message, or an empty one.
  std::string bind_result(int64_t v, AtenTensorHandle tensor) {
    const View& view = plan_.views[v];
    bool defined = false;
    int32_t device = kCpu;
    if (tensor) check(aoti_torch_is_defined(tensor, &defined));
    if (!defined) return "returned no tensor where one was expected";
    frame_.owner[view.slot] = tensor;
    check(aoti_torch_get_device_type(tensor, &device));
    Shape shape(tensor);
    if (device != kCpu || !shape.same_sizes(view))
      return "returned a tensor of size " + text_of(shape.sizes, shape.dims) + ", dtype " +
             std::to_string(shape.dtype) + ", device type " + std::to_string(device) + "; expected size " +
             text_of(view.shape.data(), static_cast<int64_t>(view.shape.size())) + ", dtype " +
             std::to_string(view.dtype) + " on the CPU";
    char* data = static_cast<char*>(data_of(tensor));
    bool in_arena = data >= frame_.base && data < frame_.base + frame_.arena->bytes;
    if (in_arena || !shape.same_strides(view, false)) {
      for (size_t i = 0; i < view.shape.size(); i++)
        if (view.strides[i] == 0 && view.shape[i] > 1)
          return "returned a tensor that cannot lie as promised: with strides " +
                 text_of(view.strides.data(), static_cast<int64_t>(view.strides.size())) + " its elements overlap";
      data = restride(view, tensor);
    }
    frame_.pointer[view.slot] = data - view.offset * view.itemsize;
    return "";
  }

  // Replaces a result by a copy with the strides of the view, in newly allocated memory.
  char* restride(const View& view, AtenTensorHandle tensor) {
    int64_t last = 0;
    for (size_t i = 0; i < view.shape.size(); i++) last += (view.shape[i] - 1) * view.strides[i];
    int64_t bytes = (last + 1) * view.itemsize;
    void* block = pool_alloc(bytes);
    AtenTensorHandle copy = from_blob(block, view.shape, view.strides, view.dtype, bytes);
    frame_.owner[view.slot] = copy;
    AOTITorchError status = aoti_torch_copy_(copy, tensor, 0);
    aoti_torch_delete_tensor_object(tensor);
    check(status);
    return static_cast<char*>(block);
  }

  // The tensor of a view, for operators and results; borrowed until the end of the run.
  AtenTensorHandle tensor(int64_t v) {
    if (frame_.tensor[v]) return frame_.tensor[v];
    const View& view = plan_.views[v];
    const Slot& slot = plan_.slots[view.slot];
    AtenTensorHandle whole = nullptr;
    if (slot.place == Place::kInput) whole = handle_at(&frame_.impl[slot.value]);
    if (slot.place == Place::kExtern) whole = frame_.owner[view.slot];
    if (slot.place == Place::kOutput) {
      AtenTensorHandle& owner = frame_.owner[view.slot];
      if (!owner) owner = output_owner(slot, frame_.pointer[view.slot]);
      whole = owner;
    }
    if (!whole) throw Failure{"internal error: a buffer is used before it exists"};
    Shape shape(whole);
    int64_t bytes = 0;  // from the start of `whole` to that of the view; an empty tensor has no address
    if (void* data = data_of(whole))
      bytes = static_cast<char*>(frame_.pointer[view.slot]) - static_cast<char*>(data) + view.offset * view.itemsize;
    if (shape.same_sizes(view) && shape.same_strides(view, true) && bytes == 0) return whole;
    frame_.tensor[v] = view_of(whole, shape.dtype, view, bytes);
    frame_.borrowed.push_back(v);
    return frame_.tensor[v];
  }

  // The tensor that owns an output block: the result itself if there is only one, else bytes for results to view.
  AtenTensorHandle output_owner(const Slot& slot, void* block) {
    if (slot.only_view < 0) return from_blob(block, {slot.value}, {1}, kByte, slot.value);
    const View& view = plan_.views[slot.only_view];
    return from_blob(block, view.shape, view.strides, view.dtype, slot.value);
  }

  static AtenTensorHandle view_of(AtenTensorHandle whole, int32_t dtype, const View& view, int64_t bytes) {
    AtenTensorHandle out;
    int64_t dims = static_cast<int64_t>(view.shape.size());
    const int64_t *sizes = view.shape.data(), *strides = view.strides.data();
    if (dtype == view.dtype)
      check(aoti_torch__reinterpret_tensor(whole, dims, sizes, strides, bytes / view.itemsize, &out));
    else
      check(aoti_torch__alloc_from_pool(whole, bytes, static_cast<int32_t>(view.dtype), dims, sizes, strides, &out));
    return out;
  }

  // The Python object of a view, as a new reference; for an unchanged argument, the same object.
  PyObject* object(int64_t v) {
    const Slot& slot = plan_.slots[plan_.views[v].slot];
    AtenTensorHandle handle = tensor(v);
    if (slot.place == Place::kInput && !frame_.tensor[v]) {
      Py_IncRef(frame_.object[slot.value]);
      return frame_.object[slot.value];
    }
    return to_python(handle);
  }

  // Like `object`, for an argument of a Python function: a view in the arena gets a new alias, so that Python's
  // changes of the tensor object (its sizes, its attributes) do not outlive the call.
  PyObject* argument(int64_t v) {
    const View& view = plan_.views[v];
    if (plan_.slots[view.slot].place != Place::kArena) return object(v);
    AtenTensorHandle alias = view_of(tensor(v), static_cast<int32_t>(view.dtype), view, 0);
    PyObject* out = to_python(alias);
    aoti_torch_delete_tensor_object(alias);
    return out;
  }

  static PyObject* to_python(AtenTensorHandle handle) {
    if (host.wrap) return host.wrap(handle);
    PyObject* list = PyList_New(1);
    PyList_SetItem(list, 0, PyCapsule_New(new_handle(handle), nullptr, nullptr));
    PyObject* out = PyObject_CallFunctionObjArgs(host.steal, list, nullptr);
    Py_DecRef(list);
    if (!out) return nullptr;
    PyObject* object = PyList_GetItem(out, 0);
    Py_IncRef(object);
    Py_DecRef(out);
    return object;
  }

  PyObject* result(const Result& result) {
    if (result.kind == ResultKind::kView) return object(result.value);
    if (result.kind == ResultKind::kInteger) return PyLong_FromLongLong(result.value);
    Py_IncRef(&_Py_NoneStruct);
    return &_Py_NoneStruct;
  }

  void drop_view(int64_t view) {
    if (frame_.tensor[view]) aoti_torch_delete_tensor_object(frame_.tensor[view]);
    frame_.tensor[view] = nullptr;
  }

  void drop(int64_t slot) {
    for (int64_t view : frame_.borrowed)
      if (plan_.views[view].slot == slot) drop_view(view);
    if (frame_.owner[slot]) aoti_torch_delete_tensor_object(frame_.owner[slot]);
    frame_.owner[slot] = nullptr;
    frame_.pointer[slot] = nullptr;
  }

  template <class Body>
  void with_gil(Body body) {
    if (*thread_) PyEval_RestoreThread(*thread_);
    bool released = *thread_;
    *thread_ = nullptr;  // so that the GIL is held again if the body throws
    body();
    if (released) *thread_ = PyEval_SaveThread();
  }

  Plan& plan_;
  Frame& frame_;
  bool profile_;
  RunTimes* times_;
  bool observed_;
  const Call* current_ = nullptr;
  PyThreadState** thread_ = nullptr;
};

}  // namespace
}  // namespace pellucid
