// The part of OpenMP that the runtime calls.
#pragma once

// The C interface of the OpenMP runtime that libtorch_cpu loads. Declared here, instead of using pragmas, so that no
// second one is linked: a process with two OpenMP runtimes has two thread pools.
extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_max_threads();
int omp_get_num_threads();
int omp_get_thread_num();
int omp_in_parallel();
int omp_pause_resource_all(int kind) __attribute__((weak));
}
