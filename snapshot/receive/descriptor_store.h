// SPDX-License-Identifier: Apache-2.0
//
// DescriptorStore gives descriptors to the service manager that runs this process, which
// keeps them while the process is restarted and passes them to the next one: the protocol of
// sd_notify(3) (FDSTORE) and sd_listen_fds(3), which are environment variables and datagrams.
// By the same protocol the manager hears that the service is up.
//
// Thread safety: Put, Remove and SayReady may be called concurrently; Find and Take change the
// environment: by one thread.

#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/descriptor.h"

namespace ckptfs {

class DescriptorStore {
 public:
  struct Kept {
    std::string name;
    Descriptor descriptor;
  };

  // Null where there is none ($NOTIFY_SOCKET).
  static std::unique_ptr<DescriptorStore> Find();
  // Returns what was kept for this process ($LISTEN_FDS); nothing the next time.
  static std::vector<Kept> Take();

  // True if it was sent; the manager does not say if it has room (FileDescriptorStoreMax=).
  // REQUIRES: the name has no ':' nor line end.
  bool Put(std::string_view name, int descriptor) const;
  void Remove(std::string_view name) const;
  // Lets the manager start what waits for a unit of Type=notify.
  void SayReady() const;

 private:
  DescriptorStore(Descriptor socket, std::string address);
  bool Send(const std::string& text, int descriptor) const;

  const Descriptor socket_;
  const std::string address_;  // of a sockaddr_un, as it is
};

}  // namespace ckptfs
