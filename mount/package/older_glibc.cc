// SPDX-License-Identifier: Apache-2.0
//
// Functions of glibc that are newer than 2.28, for programs that are linked against
// what older_glibc.py makes.  Ours and the static libraries' objects ask for them, since they
// were compiled with newer headers.  A function whose newer form is better is called if the
// machine has it; the others are what glibc itself does.
//
// Thread safety: that of the functions of these names.

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

namespace {

#ifdef __x86_64__
constexpr int kStatVersion = 1;
#else
constexpr int kStatVersion = 0;
#endif

// The machine's own function, or null.
template <class Function>
Function* Newer(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name));
}

constexpr int64_t kNanoseconds = 1'000'000'000;

int64_t Nanoseconds(const timespec& time) { return time.tv_sec * kNanoseconds + time.tv_nsec; }

int64_t Now(clockid_t clock) {
  timespec now{};
  ::clock_gettime(clock, &now);
  return Nanoseconds(now);
}

// Finds the loaded object that has an address.
struct ObjectSearch {
  uintptr_t address = 0;
  dl_find_object* found = nullptr;

  // For dl_iterate_phdr: 1 ends it.
  static int Look(dl_phdr_info* info, size_t, void* self) {
    auto& search = *static_cast<ObjectSearch*>(self);
    bool inside = false;
    void* frames = nullptr;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const auto& part = info->dlpi_phdr[i];
      const uintptr_t begin = info->dlpi_addr + part.p_vaddr;
      if (part.p_type == PT_GNU_EH_FRAME) frames = reinterpret_cast<void*>(begin);
      if (part.p_type != PT_LOAD || search.address - begin >= part.p_memsz) continue;
      inside = true;
      search.found->dlfo_map_start = reinterpret_cast<void*>(begin);
      search.found->dlfo_map_end = reinterpret_cast<void*>(begin + part.p_memsz);
    }
    if (!inside) return 0;
    search.found->dlfo_eh_frame = frames;
    return 1;
  }
};

}  // namespace

extern "C" {

// stat(2): glibc 2.33 made functions of what the headers had until then.
int __xstat(int version, const char* path, struct stat* info);
int __lxstat(int version, const char* path, struct stat* info);
int __fxstat(int version, int file, struct stat* info);
int __fxstatat(int version, int directory, const char* path, struct stat* info, int flags);

int stat(const char* path, struct stat* info) { return __xstat(kStatVersion, path, info); }
int lstat(const char* path, struct stat* info) { return __lxstat(kStatVersion, path, info); }
int fstat(int file, struct stat* info) { return __fxstat(kStatVersion, file, info); }
int fstatat(int directory, const char* path, struct stat* info, int flags) {
  return __fxstatat(kStatVersion, directory, path, info, flags);
}
static_assert(sizeof(struct stat) == sizeof(struct stat64));
int stat64(const char* path, struct stat64* info) {
  return __xstat(kStatVersion, path, reinterpret_cast<struct stat*>(info));
}
int lstat64(const char* path, struct stat64* info) {
  return __lxstat(kStatVersion, path, reinterpret_cast<struct stat*>(info));
}
int fstat64(int file, struct stat64* info) {
  return __fxstat(kStatVersion, file, reinterpret_cast<struct stat*>(info));
}

// System calls.
pid_t gettid() { return static_cast<pid_t>(::syscall(SYS_gettid)); }
int close_range(unsigned first, unsigned last, int flags) {
  return static_cast<int>(::syscall(SYS_close_range, first, last, flags));
}
uint32_t arc4random() {
  uint32_t number = 0;
  while (::getrandom(&number, sizeof number, 0) != sizeof number) {
  }
  return number;
}

// Other threads are always taken into account.
extern char __libc_single_threaded;
char __libc_single_threaded = 0;

const char* strerrordesc_np(int number) {
  static const auto newer = Newer<const char*(int)>("strerrordesc_np");
  return newer != nullptr ? newer(number) : ::strerror(number);
}

// The names of errors that ours become; nobody knows the others' on an older machine.
const char* strerrorname_np(int number) {
  static const auto newer = Newer<const char*(int)>("strerrorname_np");
  if (newer != nullptr) return newer(number);
  switch (number) {
    case EINVAL: return "EINVAL";
    case ENOENT: return "ENOENT";
    case EEXIST: return "EEXIST";
    case EOPNOTSUPP: return "EOPNOTSUPP";
    case ESTALE: return "ESTALE";
    case EACCES: return "EACCES";
    case ENOMEM: return "ENOMEM";
    case EIO: return "EIO";
    default: return nullptr;
  }
}

// A wait by the time of day, of at most a second: it is of the right length within that even if
// the time of day jumps.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const timespec* until) {
  static const auto newer =
      Newer<int(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*)>(
          "pthread_cond_clockwait");
  if (newer != nullptr) return newer(condition, mutex, clock, until);
  while (true) {
    const int64_t left = Nanoseconds(*until) - Now(clock);
    if (left <= 0) return ETIMEDOUT;
    const int64_t end = Now(CLOCK_REALTIME) + (left < kNanoseconds ? left : kNanoseconds);
    const timespec part{end / kNanoseconds, end % kNanoseconds};
    const int waited = ::pthread_cond_timedwait(condition, mutex, &part);
    if (waited != ETIMEDOUT) return waited;
  }
}

// The unwinder asks for the frames of an address.
int _dl_find_object(void* address, dl_find_object* found) noexcept {
  static const auto newer = Newer<int(void*, dl_find_object*)>("_dl_find_object");
  if (newer != nullptr) return newer(address, found);
  std::memset(found, 0, sizeof *found);
  ObjectSearch search{reinterpret_cast<uintptr_t>(address), found};
  return ::dl_iterate_phdr(&ObjectSearch::Look, &search) == 1 ? 0 : -1;
}

}  // extern "C"
