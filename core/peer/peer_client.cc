// SPDX-License-Identifier: Apache-2.0

#include "core/peer/peer_client.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"

namespace ckptfs {
namespace {

// A peer answers at once.
constexpr std::chrono::seconds kAnswerTime{3};
// It digests a file that it was sent, and looks at all its own peers for `show`.
constexpr std::chrono::seconds kWorkTime{30};

std::chrono::seconds AnswerTimeOf(PeerWord question) {
  const bool works =
      question == PeerWord::kOffer || question == PeerWord::kShow || question == PeerWord::kSpooled;
  return works ? kWorkTime : kAnswerTime;
}

// A refusal carries the code of its reason.
ErrorCode CodeOf(const PeerFrame& refused) {
  switch (static_cast<ErrorCode>(refused.offset)) {
    case ErrorCode::kNotFound: return ErrorCode::kNotFound;
    case ErrorCode::kExists: return ErrorCode::kExists;
    case ErrorCode::kExhausted: return ErrorCode::kExhausted;
    case ErrorCode::kDataLoss: return ErrorCode::kDataLoss;
    default: return ErrorCode::kInvalid;
  }
}

}  // namespace

Result<std::unique_ptr<PeerClient>> PeerClient::Connect(PeerTransport& transport,
                                                        const std::string& address,
                                                        const Digest& node,
                                                        const PeerIdentity& self) {
  CKPT_ASSIGN_OR_RETURN(auto link, transport.Connect(address));
  CKPT_ASSIGN_OR_RETURN(const Digest there, GreetPeer(*link, self));
  if (there != node) {
    return Fail(ErrorCode::kPermission, StrCat(link->about(), ": another daemon answers there"));
  }
  return std::unique_ptr<PeerClient>(new PeerClient(std::move(link)));
}

Status PeerClient::Fails(Status status) {
  if (!status) broken_ = true;
  return status;
}

Result<PeerFrame> PeerClient::Answer(PeerWord question, PeerWord expected, PeerWord other) {
  auto answer = link_->Receive(kMaxPeerText, AnswerTimeOf(question));
  if (!answer) {
    broken_ = true;
    return answer;
  }
  if (answer->word == PeerWord::kRefused && answer->payload_bytes == 0) {
    return Fail(CodeOf(*answer), answer->text);
  }
  const bool payload = expected == PeerWord::kBytes;
  if ((answer->word == expected || answer->word == other) &&
      (payload || answer->payload_bytes == 0)) {
    return answer;
  }
  broken_ = true;
  return Refuse(link_->about(), ": an answer out of turn");
}

Result<PeerFrame> PeerClient::Ask(PeerFrame question, PeerWord answer) {
  const PeerWord word = question.word;
  CKPT_RETURN_IF_ERROR(Fails(link_->Send(std::move(question), {})));
  return Answer(word, answer, answer);
}

Status PeerClient::Offer(const UnitRecord& record, const Source& source,
                         const std::function<bool(uint64_t bytes)>& paced) {
  PeerFrame offer{.word = PeerWord::kOffer, .rank = record.rank().rank, .slot = record.slot()};
  offer.text = RenderUnit(record);
  if (offer.text.size() > kMaxPeerText) {
    return Fail(ErrorCode::kUnsupported, "a rank's file is too large to be described to a peer");
  }
  CKPT_RETURN_IF_ERROR(Fails(link_->Send(std::move(offer), {})));
  CKPT_ASSIGN_OR_RETURN(PeerFrame answer,
                        Answer(PeerWord::kOffer, PeerWord::kWanted, PeerWord::kHeld));
  if (answer.word == PeerWord::kWanted) {
    CKPT_RETURN_IF_ERROR(Fails(SendBytes(source, record.bytes(), paced)));
    CKPT_ASSIGN_OR_RETURN(answer, Answer(PeerWord::kOffer, PeerWord::kHeld, PeerWord::kHeld));
  }
  if (answer.digest == DigestOfChunks(record.chunks())) return {};
  return Fail(ErrorCode::kDataLoss,
              StrCat(link_->about(), ": it holds other bytes than were sent"));
}

Status PeerClient::SendBytes(const Source& source, uint64_t bytes,
                             const std::function<bool(uint64_t bytes)>& paced) {
  for (uint64_t at = 0; at < bytes;) {
    CKPT_ASSIGN_OR_RETURN(const std::span<const std::byte> piece, source(at));
    CKPT_CHECK(!piece.empty() && piece.size() <= kMaxPeerPayload);
    CKPT_RETURN_IF_ERROR(
        link_->Send({.word = PeerWord::kChunk, .offset = at}, std::span(&piece, 1)));
    at += piece.size();
    if (paced && !paced(piece.size())) return Fail(ErrorCode::kIo, "the daemon is ending");
  }
  return {};
}

Status PeerClient::Protect(std::string_view directory, uint32_t rank, uint32_t slot) {
  CKPT_RETURN_IF_ERROR(
      Ask({.word = PeerWord::kProtect, .rank = rank, .slot = slot, .text = std::string(directory)},
          PeerWord::kDone));
  return {};
}

Status PeerClient::LetGo(std::string_view directory, uint32_t rank, uint32_t slot) {
  CKPT_RETURN_IF_ERROR(
      Ask({.word = PeerWord::kLetGo, .rank = rank, .slot = slot, .text = std::string(directory)},
          PeerWord::kDone));
  return {};
}

Result<std::vector<ShelvedPart>> PeerClient::List() {
  CKPT_ASSIGN_OR_RETURN(const PeerFrame answer, Ask({.word = PeerWord::kList}, PeerWord::kParts));
  return ParseShelved(answer.text);
}

Result<UnitRecord> PeerClient::Describe(std::string_view directory, uint32_t rank, uint32_t slot) {
  CKPT_ASSIGN_OR_RETURN(
      const PeerFrame answer,
      Ask({.word = PeerWord::kDescribe, .rank = rank, .slot = slot, .text = std::string(directory)},
          PeerWord::kPart));
  CKPT_ASSIGN_OR_RETURN(UnitRecord record, ParseUnit(answer.text));
  const bool asked = record.part.Directory() == directory && record.rank().rank == rank;
  if (asked && record.slot() == slot) return record;
  return Refuse(link_->about(), ": it describes another part than was asked for");
}

Status PeerClient::Get(std::string_view directory, uint32_t rank, uint32_t slot, uint64_t offset,
                       std::span<std::byte> out) {
  PeerFrame question{
      .word = PeerWord::kGet, .rank = rank, .slot = slot, .offset = offset, .length = out.size()};
  question.text = directory;
  CKPT_ASSIGN_OR_RETURN(const PeerFrame answer, Ask(std::move(question), PeerWord::kBytes));
  if (answer.payload_bytes != out.size()) {
    broken_ = true;
    return Refuse(link_->about(), ": ", answer.payload_bytes, " bytes, ", out.size(),
                  " were asked for");
  }
  return Fails(link_->ReceivePayload(out));
}

Result<std::vector<ShownMemoryStep>> PeerClient::Show(std::string_view run) {
  CKPT_ASSIGN_OR_RETURN(const PeerFrame answer,
                        Ask({.word = PeerWord::kShow, .text = std::string(run)}, PeerWord::kShown));
  return ParseShown(answer.text);
}

Result<std::vector<ShelvedPart>> PeerClient::Spooled(std::string_view run) {
  CKPT_ASSIGN_OR_RETURN(
      const PeerFrame answer,
      Ask({.word = PeerWord::kSpooled, .text = std::string(run)}, PeerWord::kParts));
  return ParseShelved(answer.text);
}

}  // namespace ckptfs
