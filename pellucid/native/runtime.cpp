// The runtime: executes the calls of a compiled graph. Built once per toolchain, without the C++ headers of Python and
// ATen; loaded by `loader.py`. Python calls a graph as a builtin function of one list, `run` below.
#include <pthread.h>

#include "denormals.h"
#include "fingerprint.h"
#include "run.h"
#include "twister.h"

namespace pellucid {
namespace {

// ------------------------------------------------------------------------------------------------ frames

// Creates the tensors over the arena that operators use. Called with inference mode off: inference tensors could not be
// written to outside of it.
void fill(Plan& plan, Frame& frame) {
  plan.drop_arena_tensors(frame);
  char* base = frame.arena->base;
  for (size_t i = 0; i < plan.slots.size(); i++)
    if (plan.slots[i].place == Place::kArena) frame.pointer[i] = base + plan.slots[i].value;
  for (size_t v = 0; v < plan.views.size(); v++) {
    const View& view = plan.views[v];
    if (plan.slots[view.slot].place != Place::kArena) continue;
    char* data = static_cast<char*>(frame.pointer[view.slot]) + view.offset * view.itemsize;
    frame.tensor[v] = from_blob(data, view.shape, view.strides, view.dtype, -1);
  }
  frame.base = base;
}

struct Filling {
  Plan& plan;
  Frame& frame;
};

// Reserves memory for the parts of strips, several of which run at the same time.
void reserve(const Strips& strips, std::vector<StripMemory>& memory) {
  memory.resize(std::max(memory.size(), strips.parts.size()));
  for (StripMemory& each : memory) {
    each.parameters.resize(std::max<size_t>(each.parameters.size(), strips.starts.back()));
    each.buffers.resize(std::max(each.buffers.size(), strips.windows.size()));
  }
}

Frame* frame_for(Plan& plan, Arena* arena) {
  Frame* frame = nullptr;
  {
    std::lock_guard<std::mutex> lock(plan.mutex);
    for (auto& known : plan.frames)
      if (known->arena == arena) frame = known.get();
    if (!frame) {
      frame = plan.frames.emplace_back(new Frame).get();
      frame->arena = arena;
      frame->pointer.resize(plan.slots.size());
      frame->owner.resize(plan.slots.size());
      frame->tensor.resize(plan.views.size());
      frame->object.resize(plan.inputs);
      frame->impl.resize(plan.inputs);
      frame->parameters.resize(plan.slots.size());
      for (auto& strips : plan.strips) reserve(*strips, frame->strips);
    } else if (frame->base == arena->base) {
      return frame;
    }
  }
  Filling filling{plan, *frame};
  PyObject* capsule = PyCapsule_New(&filling, nullptr, nullptr);
  PyObject* done = PyObject_CallFunctionObjArgs(host.outside_inference, capsule, nullptr);
  Py_DecRef(capsule);
  if (done) Py_DecRef(done);
  return done ? frame : nullptr;
}

class GradModeOff {
 public:
  explicit GradModeOff(bool needed) : restore_(needed && aoti_torch_grad_mode_is_enabled()) {
    if (restore_) aoti_torch_grad_mode_set_enabled(false);
  }
  ~GradModeOff() {
    if (restore_) aoti_torch_grad_mode_set_enabled(true);
  }

 private:
  bool restore_;
};

// The GIL is held.
[[gnu::noinline]] void report_trials(Plan& plan) {
  plan.unreported.exchange(false);  // synchronises with the thread that ended the trial
  for (auto& trial : plan.trials) trial->report();
}

PyObject* run_in(Plan& plan, Frame& frame, PyObject* args, RunTimes* times) {
  bool profile = PyDict_GetItem(host.profiler_globals, host.profiler_flag) == &_Py_TrueStruct;
  Run run(plan, frame, profile, times);
  PyObject* out = nullptr;
  PyThreadState* thread = nullptr;
  try {
    if (run.bind(args)) {
      GradModeOff guard(plan.has_operators);
      if (plan.release_gil) thread = PyEval_SaveThread();
      bool good = run.execute(thread);
      if (thread) PyEval_RestoreThread(thread);
      thread = nullptr;
      if (good) out = run.results();
    }
  } catch (const Failure& failure) {
    if (thread) PyEval_RestoreThread(thread);
    PyErr_SetString(failure.memory ? PyExc_MemoryError : PyExc_RuntimeError, run.describe(failure).c_str());
  } catch (const std::exception& error) {  // the standard library ran out of memory
    if (thread) PyEval_RestoreThread(thread);
    PyErr_SetString(PyExc_MemoryError, run.describe({error.what()}).c_str());
  }
  run.finish();
  if (out && plan.unreported.load(std::memory_order_relaxed)) [[unlikely]] report_trials(plan);
  return out;
}

PyObject* run_once(Plan& plan, PyObject* args, RunTimes* times) {
  ptrdiff_t n = PyList_Size(args);
  if (n < 0) return nullptr;
  if (n != plan.inputs) {
    PyErr_SetString(PyExc_TypeError, ("the graph takes " + std::to_string(plan.inputs) + " arguments, not " +
                                      std::to_string(n)).c_str());
    return nullptr;
  }
  contention.observe();
  Arena* arena = arenas.acquire(plan.arena_bytes);
  if (!arena) {
    PyErr_SetString(PyExc_MemoryError, ("out of memory: cannot allocate " + std::to_string(plan.arena_bytes) +
                                        " bytes for the temporaries of a graph").c_str());
    return nullptr;
  }
  Frame* frame = frame_for(plan, arena);
  PyObject* out = frame ? run_in(plan, *frame, args, times) : nullptr;
  arenas.release(arena);
  return out;
}

// A separate function, so that a run without timing saves no registers for it.
[[gnu::noinline]] PyObject* run_timed(Plan& plan, PyObject* args) {
  RunTimes times(plan.number, plan.calls.size(), timeline.reading(plan.number), timeline.counters());
  PyObject* out = run_once(plan, args, &times);
  timeline.add(times);
  return out;
}

PyObject* run(PyObject* self, PyObject* args) {
  Plan& plan = *static_cast<Plan*>(PyCapsule_GetPointer(self, nullptr));
  return timeline.on() ? run_timed(plan, args) : run_once(plan, args, nullptr);
}

std::vector<CounterEvent> events_of(const int64_t* words, int64_t count) {
  std::vector<CounterEvent> events;
  for (int64_t i = 0; i < count; i++) events.push_back({words[2 * i], words[2 * i + 1]});
  return events;
}

// ------------------------------------------------------------------------------------------------ frozen tensors

// The memory of a tensor: its StorageImpl and the address of its data.
struct Location {
  int64_t storage, data;
};
Location location_of(void* impl) {
  int64_t storage = *reinterpret_cast<int64_t*>(static_cast<char*>(impl) + host.storage_offset);
  return {storage, reinterpret_cast<int64_t>(data_of(handle_at(&impl)))};
}

// Whether each tensor of a list has the same memory and version counter as before; version -1: it has no counter.
// False, too, where an inference tensor has replaced one with a counter.
bool unchanged(PyObject* tensors, const int64_t* storages, const int64_t* addresses, const int64_t* versions) {
  const ptrdiff_t count = PyList_Size(tensors);
  for (ptrdiff_t k = 0; k < count; k++) {
    PyObject* tensor = PyList_GetItem(tensors, k);
    if (!is_tensor(tensor)) return false;
    void* impl = field<void*>(tensor, host.impl_offset);
    try {
      Location location = location_of(impl);
      if (location.storage != storages[k] || location.data != addresses[k]) return false;
      if (versions[k] >= 0 && host.version(handle_at(&impl)) != versions[k]) return false;
    } catch (const Failure&) {  // it has no memory
      return false;
    } catch (const std::exception&) {
      return false;
    }
  }
  return true;
}

// A hash of the memory, types, sizes and strides of a list of tensors.
uint64_t layout_hash(PyObject* tensors) {
  uint64_t hash = 0;
  for (ptrdiff_t k = 0; k < PyList_Size(tensors); k++) {
    PyObject* tensor = PyList_GetItem(tensors, k);
    if (!is_tensor(tensor)) continue;
    try {
      void* impl = field<void*>(tensor, host.impl_offset);
      const Location location = location_of(impl);
      const auto add = [&](int64_t word) { hash = (hash ^ uint64_t(word) ^ (hash >> 32)) * kOdd; };
      const Shape shape(handle_at(&impl));
      for (int64_t word : {location.storage, location.data, int64_t(shape.dtype), shape.dims}) add(word);
      for (int64_t dim = 0; dim < shape.dims; dim++) add(shape.sizes[dim]), add(shape.strides[dim]);
    } catch (const Failure&) {  // it has no memory: `unchanged` returns false for it
    }
  }
  return hash;
}

// ------------------------------------------------------------------------------------------------ random numbers

constexpr int64_t kPerThread = 1 << 14;  // minimum of numbers for each thread

struct Draw {
  char* state;  // see `Twister`
  const Twister start;
  bool* mask;
  int64_t count;
  uint64_t limit;
};

// The numbers of thread i of n, which skips those before them: skipping takes half the time of comparing.
void draw_part(const Draw& draw, int64_t i, int64_t n) {
  const int64_t begin = draw.count * i / n, end = draw.count * (i + 1) / n;
  Twister twister = draw.start;
  twister.skip(2 * begin);
  twister.below(draw.limit, draw.mask + begin, end - begin);
  if (i == n - 1) twister.save(draw.state);
}

void draw_share(void* draw) { draw_part(*static_cast<Draw*>(draw), omp_get_thread_num(), omp_get_num_threads()); }

// ------------------------------------------------------------------------------------------------ fork

// libgomp's threads do not survive a fork, and a child that expects them waits for ever. So the team of the forking
// thread is ended before; parent and child start a new one when they next need it.
void before_fork() {
  contention.end();
  bool ended = omp_pause_resource_all && omp_pause_resource_all(2) == 0;
  single_threaded = !ended;
  pool.mutex.lock();
  arenas.mutex.lock();
  timeline.mutex.lock();
}

void after_fork_in_parent() {
  timeline.mutex.unlock();
  arenas.mutex.unlock();
  pool.mutex.unlock();
  single_threaded = false;
}

void after_fork_in_child() {
  timeline.mutex.unlock();
  arenas.mutex.unlock();
  pool.mutex.unlock();
}

}  // namespace
}  // namespace pellucid

// ------------------------------------------------------------------------------------------------ for Python

using namespace pellucid;

extern "C" {

void pellucid_init(const Host* facts, int64_t pool_limit) {
  host = *facts;
  pool.set_limit(pool_limit);
  pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

// A builtin function that runs the graph that `words` describe.
PyObject* pellucid_instance(const int64_t* words) {
  static PyMethodDef method{"run", run, METH_O, "Run a compiled graph on a list of arguments; returns a list."};
  PyObject* capsule = PyCapsule_New(Reader(words).plan(), nullptr, [](PyObject* self) {
    delete static_cast<Plan*>(PyCapsule_GetPointer(self, nullptr));
  });
  PyObject* function = PyCFunction_NewEx(&method, capsule, nullptr);
  Py_DecRef(capsule);
  return function;
}

// Null, or an error message (valid until the thread's next failure).
const char* pellucid_fill(void* filling) {
  auto& [plan, frame] = *static_cast<Filling*>(filling);
  thread_local std::string message;
  try {
    fill(plan, frame);
  } catch (const Failure& failure) {
    message = failure.message;
    return message.c_str();
  }
  return nullptr;
}

void pellucid_pool_stats(int64_t* out) {
  PoolStats stats = pool.stats();
  int64_t values[] = {stats.in_use, stats.cached, stats.limit, arenas.bytes(), stats.hits, stats.misses};
  std::copy(std::begin(values), std::end(values), out);
}

int64_t pellucid_pool_trim(int64_t keep) { return pool.trim(keep) + (keep == 0 ? arenas.trim() : 0); }

void pellucid_pool_limit(int64_t bytes) { pool.set_limit(bytes); }

// events: hardware events to count too, `count` of them, two words each.
void pellucid_timeline_start(const int64_t* events, int64_t count) { timeline.start(events_of(events, count)); }

// 0, or why this thread cannot count these events, as errno.
int64_t pellucid_counters_error(const int64_t* events, int64_t count) {
  return CounterGroup(events_of(events, count)).error();
}

// The words of `Timeline::stop`, `size` of them.
const int64_t* pellucid_timeline_stop(int64_t* size) {
  const std::vector<int64_t>& words = timeline.stop();
  *size = static_cast<int64_t>(words.size());
  return words.data();
}

void pellucid_flush_denormals(bool on) { flush_denormals(on); }

// A sample of `count` blocks of memory, see fingerprint.h.
uint64_t pellucid_fingerprint(
    const int64_t* addresses, const int64_t* sizes, int64_t count, int64_t turn, int64_t turns, int64_t line) {
  return fingerprint_all(addresses, sizes, count, turn, turns, line);
}

// All samples of them, by turn and line.
void pellucid_every_fingerprint(
    const int64_t* addresses, const int64_t* sizes, int64_t count, int64_t turns, uint64_t* hashes) {
  every_fingerprint(addresses, sizes, count, turns, hashes);
}

// Whether the tensors of a list have the same memory and version counters as before, see `unchanged`.
bool pellucid_unchanged(PyObject* tensors, const int64_t* storages, const int64_t* addresses, const int64_t* versions) {
  return unchanged(tensors, storages, addresses, versions);
}

uint64_t pellucid_layout_hash(PyObject* tensors) { return layout_hash(tensors); }

// Which of the next `count` numbers of a generator are below the limit. state: of the generator, advanced as by ATen.
void pellucid_draw(char* state, bool* mask, int64_t count, uint64_t limit) {
  Draw draw{state, Twister(state), mask, count, limit};
  const int64_t threads = std::min(count / kPerThread, torch_threads());
  if (threads <= 1) draw_part(draw, 0, 1);
  else GOMP_parallel(draw_share, &draw, static_cast<unsigned>(threads), 0);
}

bool pellucid_contended() { return contention.contended(); }

}  // extern "C"
