// Calls of kernels that run strip by strip: each thread runs some iterations of each call in turn; buffers between them
// are in sliding windows. `strips.py` selects the calls and computes the steps.
#pragma once

#include "kernel_call.h"

namespace pellucid {
namespace {

struct StripsRun {
  const Plan& plan;
  const Strips& strips;
  Frame& frame;
  PartTimes* times;  // by part; null if no times are taken

  const KernelCall& kernel(int64_t number) const {
    return std::get<KernelCall>(plan.calls[strips.first + number].what);
  }
};

// Sets the parameters of all calls, one call after the other; `move_window` sets those that are in windows.
void set_parameters(const StripsRun& run, void** parameters) {
  for (int64_t number = 0; number < run.strips.calls(); number++) {
    const KernelCall& call = run.kernel(number);
    for (size_t i = 0; i < call.slots.size(); i++)
      *parameters++ = static_cast<char*>(run.frame.pointer[call.slots[i]]) + call.offsets[i];
  }
}

// Moves a window of a part such that it begins at byte `begin` of its buffer; `kept` bytes from there are copied along.
void move_window(const StripsRun& run, int64_t part, const StripWindow& window, char*& buffer, int64_t begin,
                 int64_t kept, void** parameters) {
  char* start = static_cast<char*>(run.frame.pointer[window.slot]) + part * window.bytes;
  if (kept) std::memmove(start, buffer + begin, static_cast<size_t>(kept));
  buffer = start - begin;
  for (const StripWindow::Use& use : window.uses) parameters[use.parameter] = buffer + use.offset;
}

void run_steps(const StripsRun& run, int64_t part) {
  const Strips& strips = run.strips;
  StripMemory& memory = run.frame.strips[part];
  set_parameters(run, memory.parameters.data());
  const Words& steps = strips.parts[part];
  for (const int64_t* step = steps.data(); step != steps.data() + steps.size(); step += 3) {
    if (step[0] < 0) {
      move_window(run, part, strips.windows[~step[0]], memory.buffers[~step[0]], step[1], step[2],
                  memory.parameters.data());
      continue;
    }
    const KernelCall& call = run.kernel(step[0]);
    int64_t begin = run.times ? ticks() : 0;
    call.variant.function(memory.parameters.data() + strips.starts[step[0]], call.symbols.data(), step[1], step[2]);
    if (run.times) run.times[part].calls[step[0]] += ticks() - begin;
  }
  if (run.times) run.times[part].thread = thread_number();
}

void run_part(const StripsRun& run, int64_t part) {
  with_stack([&] { run_steps(run, part); });
}

void run_parts(void* data) {
  const StripsRun& run = *static_cast<const StripsRun*>(data);
  int64_t parts = run.strips.parts.size(), n = omp_get_num_threads(), i = omp_get_thread_num();
  for (int64_t part = parts * i / n; part < parts * (i + 1) / n; part++) run_part(run, part);
}

// times: of the run, or null.
void run_strips(const Plan& plan, const Strips& strips, Frame& frame, RunTimes* times) {
  StripsRun run{plan, strips, frame, times ? times->parts(strips.parts.size(), strips.calls()) : nullptr};
  int64_t begin = times ? ticks() : 0, threads = std::min<int64_t>(strips.parts.size(), torch_threads());
  if (threads > 1) GOMP_parallel(run_parts, &run, static_cast<unsigned>(threads), 0);
  else for (size_t part = 0; part < strips.parts.size(); part++) run_part(run, part);
  if (times) times->end_parts(begin);
}

}  // namespace
}  // namespace pellucid
