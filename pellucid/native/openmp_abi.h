// The part of OpenMP that the runtime calls.
#pragma once

// The C interface of the OpenMP runtime that libtorch_cpu brings along. Named here, rather than by a pragma, so that
// nothing links another one: a process with two of them has two pools of threads and worse.
extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_max_threads();
int omp_get_num_threads();
int omp_get_thread_num();
int omp_in_parallel();
int omp_pause_resource_all(int kind) __attribute__((weak));
}
