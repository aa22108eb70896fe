// SPDX-License-Identifier: Apache-2.0
//
// The records by which daemons find each other: peers/<node> says where a daemon listens, for
// as long as it works.  A daemon that died leaves one; whoever sees by its presence that it is
// gone removes it.
//
// Thread safety: may be called concurrently.
// Inputs are hostile: a record that makes no sense is left out, with a line.

#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/digest.h"
#include "core/base/result.h"
#include "core/io/root.h"

namespace ckptfs {

inline constexpr std::string_view kPeersFolder = "peers";

struct PeerRecord {
  Digest node;
  std::string address;         // PeerListener::address
  std::string host;            // for people
  std::string failure_domain;  // PeerNode::failure_domain
  bool operator==(const PeerRecord&) const = default;
};

std::string PeerRecordName(const Digest& node);
std::string RenderPeer(const PeerRecord& record);
// `node`: which the record's name says.
Result<PeerRecord> ParsePeer(std::string_view bytes, const Digest& node);

// Writes a daemon's record; replaces an earlier one.  BLOCKS: on the store.
Status AnnouncePeer(Storage& storage, const PeerRecord& record);
// All records, by node; those of `known` nodes are not read again.  BLOCKS: on the store.
Result<std::vector<PeerRecord>> ReadPeers(const Storage& storage,
                                          const std::vector<PeerRecord>& known,
                                          const std::function<void(std::string_view)>& log);

}  // namespace ckptfs
