// SPDX-License-Identifier: Apache-2.0

#include "core/peer/peer_server.h"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "core/base/names.h"
#include "core/base/single_flight.h"
#include "core/base/strings.h"
#include "core/blob/chunk_digests.h"

namespace ckptfs {
namespace {

constexpr std::chrono::milliseconds kPause{200};  // after an accept that failed

}  // namespace

PeerServer::PeerServer(std::unique_ptr<PeerListener> listener, PeerServerOptions options)
    : listener_(std::move(listener)), options_(std::move(options)) {
  thread_ = std::thread([this] { AcceptAll(); });
}

PeerServer::~PeerServer() {
  stopping_ = true;
  listener_->Close();
  thread_.join();
  {
    MutexLock lock(mutex_);
    for (Session& session : sessions_) session.link->Close();
  }
  Reap(true);
}

size_t PeerServer::links() const {
  MutexLock lock(mutex_);
  return sessions_.size();
}

void PeerServer::Reap(bool all) {
  std::list<Session> gone;
  {
    MutexLock lock(mutex_);
    for (auto at = sessions_.begin(); at != sessions_.end();) {
      const auto next = std::next(at);
      if (all || at->stage == Stage::kOver) gone.splice(gone.end(), sessions_, at);
      at = next;
    }
  }
  for (Session& session : gone) session.thread.join();
}

void PeerServer::AcceptAll() {
  while (!stopping_) {
    auto link = listener_->Accept();
    Reap(false);
    if (!link) {
      if (!stopping_) std::this_thread::sleep_for(kPause);
      continue;
    }
    Begin(*std::move(link));
  }
}

bool PeerServer::HasRoom() const {
  const auto strangers =
      std::count_if(sessions_.begin(), sessions_.end(),
                    [](const Session& session) { return session.stage == Stage::kGreets; });
  return sessions_.size() < options_.max_links &&
         static_cast<size_t>(strangers) < options_.max_strangers;
}

// A link for which there is no room, or no thread, is closed.
void PeerServer::Begin(std::unique_ptr<PeerLink> link) {
  MutexLock lock(mutex_);
  if (stopping_ || !HasRoom()) return;
  Session& session = sessions_.emplace_back();
  session.link = std::move(link);
  try {
    session.thread = std::thread([this, &session] {
      Serve(session);
      session.link->Close();
      session.stage = Stage::kOver;
    });
  } catch (const std::system_error& error) {
    sessions_.pop_back();
    if (options_.log) options_.log(StrCat("peer: no thread for a link: ", error.what()));
  }
}

void PeerServer::Serve(Session& session) {
  PeerLink& link = *session.link;
  const auto known = AnswerPeer(link, options_.self, options_.greeting);
  if (!known) {
    if (options_.log && known.error().code != ErrorCode::kNotFound)
      options_.log(StrCat("peer: ", known.error().message));
    return;
  }
  session.stage = Stage::kServes;
  while (!stopping_) {
    const auto frame = link.Receive(kMaxPeerText, options_.idle);
    if (!frame) return;
    const Status answered = Caught([&] { return Answer(link, *frame); });
    if (answered) continue;
    if (!stopping_ && options_.log) options_.log(StrCat("peer: ", answered.error().message));
    return;
  }
}

Status PeerServer::SayRefused(PeerLink& link, const Error& error) {
  PeerFrame refused{.word = PeerWord::kRefused};
  refused.offset = static_cast<uint64_t>(error.code);
  refused.text = error.message.substr(0, 1024);
  return link.Send(std::move(refused), {});
}

Status PeerServer::Say(PeerLink& link, PeerWord word, std::string text) {
  if (text.size() > kMaxPeerText) {
    return SayRefused(link, {ErrorCode::kExhausted, "the answer is too long for a frame"});
  }
  return link.Send({.word = word, .text = std::move(text)}, {});
}

Status PeerServer::Answer(PeerLink& link, const PeerFrame& frame) {
  if (frame.payload_bytes != 0) return Refuse(link.about(), ": a payload out of turn");
  switch (frame.word) {
    case PeerWord::kOffer: return TakeOffer(link, frame);
    case PeerWord::kGet: return SendBytes(link, frame);
    case PeerWord::kList: {
      return Say(link, PeerWord::kParts, RenderShelved(options_.shelf->List()));
    }
    case PeerWord::kProtect:
    case PeerWord::kLetGo: {
      const bool there = frame.word == PeerWord::kProtect
                             ? options_.shelf->Protect(frame.text, frame.rank, frame.slot)
                             : options_.shelf->Remove(frame.text, frame.rank, frame.slot);
      if (there && options_.changed) options_.changed();
      if (there) return link.Send({.word = PeerWord::kDone}, {});
      return SayRefused(link, {ErrorCode::kNotFound, "it is not held"});
    }
    case PeerWord::kDescribe: {
      const auto file = options_.shelf->Find(frame.text, frame.rank, frame.slot);
      if (!file) return SayRefused(link, {ErrorCode::kNotFound, "it is not held"});
      return Say(link, PeerWord::kPart, RenderUnit(file->record()));
    }
    case PeerWord::kShow: {
      CKPT_RETURN_IF_ERROR(CheckName(frame.text, "run"));
      const auto shown = options_.show ? options_.show(frame.text) : std::vector<ShownMemoryStep>();
      if (!shown) return SayRefused(link, shown.error());
      return Say(link, PeerWord::kShown, RenderShown(*shown));
    }
    case PeerWord::kSpooled: return SaySpooled(link, frame.text);
    default: return Refuse(link.about(), ": a word out of turn");
  }
}

Status PeerServer::SaySpooled(PeerLink& link, const std::string& run) {
  CKPT_RETURN_IF_ERROR(CheckName(run, "run"));
  const auto saves = options_.spooled ? options_.spooled() : std::vector<PreparedPart>();
  if (!saves) return SayRefused(link, saves.error());
  std::vector<ShelvedPart> parts;
  for (const PreparedPart& save : *saves) {
    if (save.name.run != run) continue;
    for (const PreparedRank& rank : save.ranks) {
      PreparedPart part = save;
      part.ranks = {rank};
      parts.push_back(ShelvedOf({std::move(part), {}, 0}, ShelvedState::kHeld));
    }
  }
  return Say(link, PeerWord::kParts, RenderShelved(parts));
}

Status PeerServer::TakeOffer(PeerLink& link, const PeerFrame& frame) {
  CKPT_ASSIGN_OR_RETURN(const UnitRecord record, ParseUnit(frame.text));
  PeerFrame held{.word = PeerWord::kHeld, .digest = DigestOfChunks(record.chunks())};
  auto file = options_.shelf->Begin(record);
  if (!file && file.error().code == ErrorCode::kExists) {
    const auto there =
        options_.shelf->Find(record.part.Directory(), record.rank().rank, record.slot());
    if (there && there->record().IsOf(record)) return link.Send(std::move(held), {});
  }
  if (!file) return SayRefused(link, file.error());
  CKPT_RETURN_IF_ERROR(link.Send({.word = PeerWord::kWanted}, {}));
  CKPT_RETURN_IF_ERROR(Fill(link, **file));
  const Status shelved = options_.shelf->Shelve(*std::move(file));
  const auto there =
      options_.shelf->Find(record.part.Directory(), record.rank().rank, record.slot());
  // Another one may have offered it meanwhile.
  if (!shelved && !(there && there->record().IsOf(record))) {
    if (options_.log)
      options_.log(StrCat("peer: from ", link.about(), ": ", shelved.error().message));
    return SayRefused(link, shelved.error());
  }
  if (options_.changed) options_.changed();
  return link.Send(std::move(held), {});
}

Status PeerServer::Fill(PeerLink& link, ShelfFile& file) {
  std::span<std::byte> room = file.room();
  for (uint64_t at = 0; at < room.size();) {
    CKPT_ASSIGN_OR_RETURN(const PeerFrame chunk,
                          link.Receive(kMaxGreetingText, options_.next_chunk));
    if (chunk.word != PeerWord::kChunk || chunk.offset != at || chunk.payload_bytes == 0 ||
        chunk.payload_bytes > room.size() - at) {
      return Refuse(link.about(), ": a chunk that is not the next one");
    }
    CKPT_RETURN_IF_ERROR(link.ReceivePayload(room.subspan(at, chunk.payload_bytes)));
    at += chunk.payload_bytes;
    received_ += chunk.payload_bytes;
  }
  return {};
}

Status PeerServer::SendBytes(PeerLink& link, const PeerFrame& frame) {
  const auto file = options_.shelf->Find(frame.text, frame.rank, frame.slot);
  if (!file) return SayRefused(link, {ErrorCode::kNotFound, "it is not held"});
  const auto bytes = file->bytes();
  if (frame.length > kMaxPeerPayload || frame.offset > bytes.size() ||
      frame.length > bytes.size() - frame.offset) {
    return Refuse(link.about(), ": a range that is not in the file");
  }
  const auto piece = bytes.subspan(frame.offset, frame.length);
  return link.Send({.word = PeerWord::kBytes, .offset = frame.offset}, std::span(&piece, 1));
}

}  // namespace ckptfs
