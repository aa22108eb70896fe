// SPDX-License-Identifier: Apache-2.0

#include "snapshot/receive/descriptor_store.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "core/base/fault_point.h"
#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr int kFirstDescriptor = 3;  // of those that are passed
constexpr int kMostDescriptors = 1 << 16;

// "" if it is not set.
std::string TakeVariable(const char* name) {
  const char* value = getenv(name);
  std::string text = value == nullptr ? "" : value;
  unsetenv(name);
  return text;
}

std::vector<DescriptorStore::Kept> ReadPassed() {
  const std::string process = TakeVariable("LISTEN_PID");
  const std::string number = TakeVariable("LISTEN_FDS");
  const std::string names = TakeVariable("LISTEN_FDNAMES");
  if (process != StrCat(getpid())) return {};
  const long count = strtol(number.c_str(), nullptr, 10);
  std::vector<DescriptorStore::Kept> kept;
  size_t from = 0;
  for (int i = 0; i < count && i < kMostDescriptors; ++i) {
    const int descriptor = kFirstDescriptor + i;
    if (fcntl(descriptor, F_SETFD, FD_CLOEXEC) != 0) break;
    const size_t to = names.find(':', from);
    kept.push_back(
        {from <= names.size() ? names.substr(from, to - from) : "", Descriptor(descriptor)});
    from = to == std::string::npos ? names.size() + 1 : to + 1;
  }
  return kept;
}

// The descriptors that were passed to this process, and nobody has taken; read once.
std::vector<DescriptorStore::Kept>& Passed() {
  static std::vector<DescriptorStore::Kept> passed = ReadPassed();
  return passed;
}

}  // namespace

DescriptorStore::DescriptorStore(Descriptor socket, std::string address)
    : socket_(std::move(socket)), address_(std::move(address)) {}

std::unique_ptr<DescriptorStore> DescriptorStore::Find() {
  const char* path = getenv("NOTIFY_SOCKET");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path == nullptr || (path[0] != '/' && path[0] != '@') ||
      strlen(path) >= sizeof address.sun_path) {
    return nullptr;
  }
  const size_t length = strlen(path);
  std::memcpy(address.sun_path, path, length);
  if (path[0] == '@') address.sun_path[0] = '\0';  // an abstract one
  const size_t bytes =
      offsetof(sockaddr_un, sun_path) + length + static_cast<size_t>(path[0] == '/' ? 1 : 0);
  Descriptor socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return nullptr;
  return std::unique_ptr<DescriptorStore>(new DescriptorStore(
      std::move(socket), std::string(reinterpret_cast<const char*>(&address), bytes)));
}

std::vector<DescriptorStore::Kept> DescriptorStore::Take(std::string_view prefix) {
  std::vector<Kept> taken, rest;
  for (Kept& one : Passed()) {
    (std::string_view(one.name).starts_with(prefix) ? taken : rest).push_back(std::move(one));
  }
  Passed() = std::move(rest);
  return taken;
}

bool DescriptorStore::Has(std::string_view name) {
  const char* const process = getenv("LISTEN_PID");
  const char* const names = getenv("LISTEN_FDNAMES");
  if (process == nullptr || names == nullptr || process != StrCat(getpid())) return false;
  return StrCat(":", names, ":").find(StrCat(":", name, ":")) != std::string::npos;
}

Status DescriptorStore::Leave(const std::vector<Kept>& kept) {
  const int end = kFirstDescriptor + static_cast<int>(kept.size());
  std::vector<Descriptor> aside;  // above all the numbers that are given out
  for (const Kept& one : kept) {
    aside.emplace_back(fcntl(one.descriptor.get(), F_DUPFD_CLOEXEC, end));
    if (!aside.back().valid()) return Fail(ErrnoError(errno, "passing descriptors on"));
  }
  std::string names;
  for (size_t i = 0; i < kept.size(); ++i) {
    if (dup2(aside[i].get(), kFirstDescriptor + static_cast<int>(i)) < 0) {
      return Fail(ErrnoError(errno, "passing descriptors on"));
    }
    names += StrCat(i == 0 ? "" : ":", kept[i].name);
  }
  // Nothing else is for the next program, whoever opened it.
  close_range(static_cast<unsigned>(end), ~0u, CLOSE_RANGE_CLOEXEC);
  setenv("LISTEN_PID", StrCat(getpid()).c_str(), 1);
  setenv("LISTEN_FDS", StrCat(kept.size()).c_str(), 1);
  setenv("LISTEN_FDNAMES", names.c_str(), 1);
  return {};
}

bool DescriptorStore::Put(std::string_view name, int descriptor) const {
  if (!Send(StrCat("FDSTORE=1\nFDNAME=", name), descriptor)) return false;
  Note(name, descriptor);
  return true;
}

void DescriptorStore::Note(std::string_view name, int descriptor) const {
  MutexLock lock(mutex_);
  put_[std::string(name)] = Descriptor(fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
}

std::vector<DescriptorStore::Kept> DescriptorStore::All() const {
  std::vector<Kept> all;
  MutexLock lock(mutex_);
  for (const auto& [name, descriptor] : put_) {
    all.push_back({name, Descriptor(fcntl(descriptor.get(), F_DUPFD_CLOEXEC, 0))});
  }
  return all;
}

void DescriptorStore::Remove(std::string_view name) const {
  (void)Send(StrCat("FDSTOREREMOVE=1\nFDNAME=", name), -1);
  MutexLock lock(mutex_);
  if (const auto put = put_.find(name); put != put_.end()) put_.erase(put);
}

void DescriptorStore::SayReady() const { (void)Send("READY=1", -1); }

bool DescriptorStore::Send(const std::string& text, int descriptor) const {
  iovec part{const_cast<char*>(text.data()), text.size()};
  msghdr out{};
  out.msg_name = const_cast<char*>(address_.data());
  out.msg_namelen = static_cast<socklen_t>(address_.size());
  out.msg_iov = &part;
  out.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof descriptor)] = {};
  if (descriptor >= 0) {
    out.msg_control = control;
    out.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&out);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof descriptor);
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  }
  FaultPoint();
  while (sendmsg(socket_.get(), &out, MSG_NOSIGNAL) < 0) {
    if (errno != EINTR) return false;
  }
  FaultPoint();
  return true;
}

}  // namespace ckptfs
