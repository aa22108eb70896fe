// SPDX-License-Identifier: Apache-2.0
//
// PeerRoot is the files of a step that daemons hold in memory, read from wherever they are
// (held_file.h).
//
// Thread safety: all methods may be called concurrently.
// Lifetime: files outlive it.  Both keep what is on the own shelf.
// Units: bytes.

#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/result.h"
#include "core/io/root.h"
#include "core/peer/held_file.h"
#include "core/peer/memory_attempts.h"
#include "core/peer/peer_pool.h"
#include "core/peer/peer_shelf.h"

namespace ckptfs {

class PeerRoot final : public Root {
 public:
  struct Places {
    const PeerShelf* shelf = nullptr;  // asked now, not later
    std::shared_ptr<PeerPool> pool;
    std::shared_ptr<const Root> store;  // its blobs; may be null
    std::function<void(std::string_view line)> log;
  };
  // Asks for the record of each rank's file.  kDataLoss if none that answers fits.
  // REQUIRES: the attempt is whole.  BLOCKS: on the network.
  static Result<std::shared_ptr<PeerRoot>> Open(const MemoryAttempt& attempt, Places places);

  // Other nodes hold it now, perhaps.
  void Update(const MemoryAttempt& attempt);
  // The step's part, with the ranks of all nodes.
  const PreparedPart& part() const { return part_; }

  Result<std::vector<RootEntry>> List(std::string_view path) const override;
  Result<EntryStat> Stat(std::string_view path) const override;
  Result<std::shared_ptr<const File>> Open(std::string_view path) const override;

 private:
  explicit PeerRoot(PreparedPart part);
  Status Add(const MemoryAttempt& attempt, uint32_t rank, const Places& places,
             const HeldFile::Places& of_file);

  PreparedPart part_;
  std::map<std::string, std::shared_ptr<HeldFile>, std::less<>> files_;  // by path
};

}  // namespace ckptfs
