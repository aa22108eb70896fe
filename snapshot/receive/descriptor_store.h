// SPDX-License-Identifier: Apache-2.0
//
// DescriptorStore gives descriptors to the service manager that runs this process, which
// keeps them while the process is restarted and passes them to the next one: the protocol of
// sd_notify(3) (FDSTORE) and sd_listen_fds(3), which are environment variables and datagrams.
// By the same protocol the manager hears that the service is up.
//
// A process that another program takes the place of (execve) passes descriptors by it, too.
//
// Thread safety: Put, Remove and SayReady may be called concurrently; the others read or change
// the environment: by one thread.

#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/descriptor.h"
#include "core/base/mutex.h"
#include "core/base/result.h"

namespace ckptfs {

class DescriptorStore {
 public:
  struct Kept {
    std::string name;
    Descriptor descriptor;
  };

  // Null where there is none ($NOTIFY_SOCKET).
  static std::unique_ptr<DescriptorStore> Find();
  // Returns what was kept for this process ($LISTEN_FDS) under names that begin so; nothing the
  // next time.
  static std::vector<Kept> Take(std::string_view prefix);
  // True if something was kept for this process under this name, before the first Take.
  static bool Has(std::string_view name);
  // Has this process's next program find descriptors as Take finds them.  For the moment before
  // execve: the numbers from 3 on are theirs afterwards, whatever had them.
  static Status Leave(const std::vector<Kept>& kept);

  // True if it was sent; the manager does not say if it has room (FileDescriptorStoreMax=).
  // REQUIRES: the name has no ':' nor line end.
  bool Put(std::string_view name, int descriptor) const;
  void Remove(std::string_view name) const;
  // Counts as put what an earlier program of this process, or process, has put.
  void Note(std::string_view name, int descriptor) const;
  // Copies of what was put and not removed.
  std::vector<Kept> All() const;
  // Lets the manager start what waits for a unit of Type=notify.
  void SayReady() const;

 private:
  DescriptorStore(Descriptor socket, std::string address);
  bool Send(const std::string& text, int descriptor) const;

  const Descriptor socket_;
  const std::string address_;  // of a sockaddr_un, as it is
  mutable Mutex mutex_;
  mutable std::map<std::string, Descriptor, std::less<>> put_ GUARDED_BY(mutex_);
};

}  // namespace ckptfs
