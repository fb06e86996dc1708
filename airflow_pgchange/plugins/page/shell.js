// Libraries of Airflow's shell: React, its router and Chakra. The shell of Airflow 3.1 has no Chakra for plugins.
const { React, ReactRouterDOM, ChakraUI } = globalThis;

export const h = React.createElement;
export const { Fragment, createContext, useCallback, useContext, useEffect, useMemo, useRef, useState } = React;
export const { Link, useLocation, useSearchParams } = ReactRouterDOM;
export const chakra = ChakraUI ?? (await import("./elements.js")).elements;
