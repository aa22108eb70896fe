// SPDX-License-Identifier: Apache-2.0
//
// LandingState is where a save is on its way from whole to durable, and TransitionOf is all that
// may happen to it there, as rows.  One daemon is a world of one: a save of which all ranks are
// here is entered and persisted, one of which others have ranks is prepared and decided.
//
//                    entered          persisted
//   taken ──► WHOLE ───────────► SHOWN ──────────────────────► DURABLE
//               │ prepared            decided        published    ▲
//               └─────────► PREPARED ─────────► DECIDED ──────────┘
//
// Each of them but DURABLE may also end as DROPPED; WHOLE may be found to be DURABLE; WHOLE and
// SHOWN end as LEFT when the daemon ends and the spool has them.  Where the bytes are (arena,
// spool, peers) is not a state.
//
// Thread safety: immutable.

#pragma once

#include <span>
#include <string_view>

#include "core/base/result.h"

namespace ckptfs {

enum class LandingState {
  kWhole,     // this machine's parts are here
  kShown,     // in memory, under the name that it will keep
  kPrepared,  // this machine's part is durable; others have the rest
  kDecided,   // all parts are durable, and it was decided that they become a step
  kDurable,
  kDropped,
  kLeft,  // in the spool, for the next daemon
};

enum class LandingEvent {
  kEntered,    // a mount shows it from memory
  kFound,      // an earlier daemon has stored it
  kPersisted,  // the store has it
  kPrepared,   // the store has this machine's part
  kDecided,    // somebody has decided that it becomes a step
  kPublished,  // several daemons made it a step
  kRefused,    // it never becomes a step: it is not one, its bytes changed, others dropped it
  kGaveUp,     // the store has failed for too long, or others did not come
  kLeft,       // the daemon ends, and the spool has it
};

// The next thing to do with a save.
enum class LandingAction {
  kEnter,
  kPersist,
  kPrepare,
  kLook,     // what has become of the attempt, and publish it if it is our turn
  kDurable,  // tell that it is
  kDrop,     // show it no more, and tell why
  kForget,
};

struct LandingTransition {
  LandingState from;
  LandingEvent event;
  LandingState to;
  LandingAction action;  // that follows
};

// All transitions there are.
std::span<const LandingTransition> LandingTransitions();
// Null: the event cannot happen to a save in that state.
const LandingTransition* TransitionOf(LandingState from, LandingEvent event);
// `all_here`: this daemon has all ranks of the world.
inline LandingAction FirstAction(bool all_here) {
  return all_here ? LandingAction::kEnter : LandingAction::kPrepare;
}
// True if that action's failure does not pass: it is not tried again.
bool IsFinal(LandingAction action, ErrorCode code);
std::string_view NameOf(LandingState state);

}  // namespace ckptfs
