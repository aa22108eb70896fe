// SPDX-License-Identifier: Apache-2.0
//
// SaidSteps is what a rank has said to its daemon of attempts that are not over, message by
// message, so that it can be said again to the daemon that comes after it.
//
// Thread safety: none.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "snapshot/wire/protocol.h"

namespace ckptfs {

class SaidSteps {
 public:
  // Adds a message to be sent: begin, chunk, end or drop.  False if it need
  // not be sent, since its attempt was over when the last daemon went.
  bool Add(const SnapshotMessage& message);
  // Returns the next message to be sent, those of the oldest attempt first.
  std::optional<SnapshotMessage> Next() const;
  // Notes that the message which Next returned for this attempt was sent.
  void Sent(uint64_t attempt);
  // Notes that the daemon has it all on a disk, at `place`: the next daemon is only asked about it.
  void Shelve(uint64_t attempt, const std::string& place);
  // Notes that the daemon has said what became of it.
  void Settle(uint64_t attempt);
  // True if nothing is left that another daemon could finish.
  bool empty() const;
  // Begins again with another daemon: all that is not over is to be sent again.
  void Restart();
  // True if the attempt is not over, and must be said to another daemon if there is one.
  bool Has(uint64_t attempt) const;
  // Returns the chunks of all attempts that are not over.
  std::vector<uint64_t> Chunks() const;

 private:
  struct Attempt {
    std::vector<SnapshotMessage> said;
    size_t sent = 0;       // of them
    bool settled = false;  // by the daemon
    bool muted = false;    // was settled before its end, by a daemon that is gone
    bool shelved = false;
    bool Ended() const;
    bool Dropped() const;
  };
  std::map<uint64_t, Attempt> attempts_;
};

}  // namespace ckptfs
