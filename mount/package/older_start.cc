// SPDX-License-Identifier: Apache-2.0
//
// The start of a program that runs on a glibc before 2.34, too.  That expects from the program
// a function that runs its constructors; a newer one calls it if it is given.  The linker puts
// it in by --wrap=__libc_start_main.

extern "C" {

using Main = int (*)(int, char**, char**);
using Initialiser = void (*)(int, char**, char**);

void _init();
extern const Initialiser __preinit_array_start[] __attribute__((visibility("hidden")));
extern const Initialiser __preinit_array_end[] __attribute__((visibility("hidden")));
extern const Initialiser __init_array_start[] __attribute__((visibility("hidden")));
extern const Initialiser __init_array_end[] __attribute__((visibility("hidden")));

int __real___libc_start_main(Main main, int count, char** words, Initialiser init, void (*fini)(),
                             void (*loader_fini)(), void* stack_end);

static void Initialise(int count, char** words, char** environment) {
  for (const auto* call = __preinit_array_start; call != __preinit_array_end; ++call) {
    (*call)(count, words, environment);
  }
  _init();
  for (const auto* call = __init_array_start; call != __init_array_end; ++call) {
    (*call)(count, words, environment);
  }
}

int __wrap___libc_start_main(Main main, int count, char** words, Initialiser, void (*fini)(),
                             void (*loader_fini)(), void* stack_end) {
  return __real___libc_start_main(main, count, words, &Initialise, fini, loader_fini, stack_end);
}
}
