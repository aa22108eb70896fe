// SPDX-License-Identifier: Apache-2.0

#include "core/peer/peer_records.h"

#include <algorithm>

#include "core/base/strings.h"
#include "core/peer/tcp_transport.h"
#include "core/records/record_text.h"
#include "core/records/records.h"

namespace ckptfs {
namespace {

constexpr size_t kMaxPeers = 4096;
constexpr size_t kMaxText = 255;

}  // namespace

std::string PeerRecordName(const Digest& node) { return StrCat(kPeersFolder, "/", node.Hex()); }

std::string RenderPeer(const PeerRecord& record) {
  return SealRecord({{"version", kRecordVersion},
                     {"node", record.node.Hex()},
                     {"address", EncodeText(record.address)},
                     {"host", EncodeText(record.host)},
                     {"failure_domain", EncodeText(record.failure_domain)}});
}

Result<PeerRecord> ParsePeer(std::string_view bytes, const Digest& node) {
  CKPT_ASSIGN_OR_RETURN(const nlohmann::json object, UnsealRecord(bytes));
  const auto said = DigestFromHex(TextOf(object, "node").value_or(""));
  PeerRecord record{node, TextOf(object, "address").value_or(""),
                    TextOf(object, "host").value_or(""),
                    TextOf(object, "failure_domain").value_or("")};
  if (said != node) return Refuse("record: of another node than its name says");
  if (record.host.size() > kMaxText || record.failure_domain.size() > kMaxText) {
    return Refuse("record: a name of more than ", kMaxText, " bytes");
  }
  CKPT_RETURN_IF_ERROR(ParseTcpAddress(record.address));
  return record;
}

Status AnnouncePeer(Storage& storage, const PeerRecord& record) {
  CKPT_ASSIGN_OR_RETURN(const auto writer, storage.Create(PeerRecordName(record.node)));
  const std::string text = RenderPeer(record);
  CKPT_RETURN_IF_ERROR(writer->WriteAt(0, std::as_bytes(std::span(text))));
  return writer->Close();
}

Result<std::vector<PeerRecord>> ReadPeers(const Storage& storage,
                                          const std::vector<PeerRecord>& known,
                                          const std::function<void(std::string_view)>& log) {
  std::vector<PeerRecord> peers;
  CKPT_ASSIGN_OR_RETURN(const auto paths, ListFilesBelow(storage, kPeersFolder));
  for (const std::string& path : paths) {
    const auto node = DigestNamed(LastComponent(path));
    if (!node || path != PeerRecordName(*node)) continue;
    if (peers.size() >= kMaxPeers)
      return Fail(ErrorCode::kExhausted, StrCat("more than ", kMaxPeers, " peers"));
    const auto same = std::find_if(known.begin(), known.end(),
                                   [&](const PeerRecord& one) { return one.node == *node; });
    if (same != known.end()) {
      peers.push_back(*same);
      continue;
    }
    const auto text = ReadWhole(storage, path, kRecordMaxBytes);
    if (!text && text.error().code == ErrorCode::kNotFound) continue;  // it has left
    if (!text) return Fail(Error(text.error()));
    auto record = ParsePeer(*text, *node);
    if (record) {
      peers.push_back(*std::move(record));
    } else if (log) {
      log(StrCat(storage.PathOf(path), ": ", record.error().message));
    }
  }
  return peers;
}

}  // namespace ckptfs
